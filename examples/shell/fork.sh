#!/usr/bin/env bash
# Prefill a prompt, decode it on a stream, fork it, decode both branches in the same frames, release.
# Needs buf (PyPI: buf-bin) and jq:   examples/shell/fork.sh [TARGET]
set -euo pipefail
target=${1:-127.0.0.1:50051}
protos=$(cd "$(dirname "$0")/../../protos" && pwd)
schema=$(mktemp --suffix=.binpb)
trap 'rm -f "$schema"' EXIT
buf build "$protos" -o "$schema"
owner= # the server that has the handles, for the proxy on the way
call() { # call SERVICE/METHOD REQUEST
  buf curl --schema "$schema" --protocol grpc --http2-prior-knowledge --timeout 30s \
    ${owner:+--header "ferrule-instance: $owner"} -d "$2" "http://$target/ferrule.v1.$1"
}
# Moves every branch by the token that was chosen for it, in one frame, and has the next one chosen.
step() { # step BRANCHES: [{tokens, handle, policy}, ...]
  local frame='{items: [to_entries[] | {seq: .key, decode: {inputIds: .value.tokens[-1:], kvCache: .value.handle,
    logitsPolicy: .value.policy}}]}'
  call ModelExecutorService/StreamDecode "$(jq "$frame" <<< "$1")" | jq -s --argjson branches "$1" '
    map(.results[]) | if any(.error) then error(map(.error.message) | tostring) else . end |
    reduce .[] as $result ($branches; ($result.seq // 0 | tonumber) as $i |
      .[$i].handle = $result.decode.kvCache | .[$i].tokens += $result.decode.outputs.tokens)'
}

ids=$(call TokenizerService/Tokenize '{"text": "def read_file(path):", "addBeginTokens": true}' | jq .tokenIds)
prompt=$(jq -n --argjson ids "$ids" --arg id "$RANDOM$RANDOM-$$" \
  '{input: {inputIds: $ids, logitsPolicy: {greedyArgmax: {}}, requestId: $id}}')
trunk=$(call ModelExecutorService/Prefill "$prompt" |
  jq '[.output | {tokens: .outputs.tokens, handle: .kvCache, policy: {greedyArgmax: {}}}]')
owner=$(jq -r '.[0].handle.instance' <<< "$trunk")
for _ in 1 2 3 4; do trunk=$(step "$trunk"); done
forked=$(call ModelExecutorService/ForkCache "$(jq '{kvCache: .[0].handle, count: 2}' <<< "$trunk")")
branches=$(jq --argjson trunk "$trunk" '[.kvCaches | to_entries[] |
  {tokens: $trunk[0].tokens, handle: .value, policy: {sample: {temperature: 0.8, seed: .key}}}]' <<< "$forked")
for _ in 1 2 3 4 5 6 7 8; do branches=$(step "$branches"); done
for i in 0 1; do
  call TokenizerService/Detokenize "$(jq "{tokenIds: .[$i].tokens}" <<< "$branches")" | jq -r '.text + "\n--"'
done
release=$(jq -n --argjson all "[$trunk, $branches]" '{kvCaches: ($all | add | map(.handle))}')
call ModelExecutorService/ReleaseCache "$release" | jq -r '"released \(.results | map(select(.released)) | length)"'
