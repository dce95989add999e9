#!/bin/sh
# What runs in every container: `splitserve ARGUMENT...`, with the API key in /keys for clients without one, and with
# three additions.
#
#   fetch-model NAME    fetches an embedded model into /models; any other name needs no fetching
#   show-key            prints the API key of clients, and Grafana's password
#   prefill-worker ..., decode-worker ..., worker ...
#                       with a worker id and an address that follow from the container: prefill-3f2a91c0d4e7 listens at
#                       3f2a91c0d4e7, which is the start of the container's id and its name in Docker's DNS. With the
#                       host's network the address stands in SPLITSERVE_ADVERTISE_ADDRESS and variables beside it
set -eu

# Only clients have a target.
if [ -n "${SPLITSERVE_TARGET:-}" ] && [ -z "${SPLITSERVE_API_KEY:-}" ] && [ -r /keys/api_key ]; then
  SPLITSERVE_API_KEY=$(cat /keys/api_key)
  export SPLITSERVE_API_KEY
fi

case "${1-}" in
  fetch-model)
    if splitserve model list | cut -f1 | grep -qxF -- "$2"; then
      exec splitserve model fetch "$2"
    fi
    ;;
  show-key)
    echo "API key: ${SPLITSERVE_API_KEY:-}"
    echo "Grafana: admin / $(cat /keys/grafana_password)"
    ;;
  prefill-worker | decode-worker | worker)
    command=$1
    shift
    set -- --worker-id "${command%-worker}-$(hostname)" "$@"
    if [ -z "${SPLITSERVE_ADVERTISE_ADDRESS:-}" ]; then
      set -- --host 0.0.0.0 --port 50061 --advertise-address "$(hostname):50061" "$@"
    fi
    exec splitserve "$command" "$@"
    ;;
  *)
    exec splitserve "$@"
    ;;
esac
