"""The OpenAI-compatible HTTP face: `app` names its endpoints, `http_server` runs it in the coordinator's loop."""
