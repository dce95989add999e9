"""What both workers run: model, paged KV pool, scheduler, sampler."""
