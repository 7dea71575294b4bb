// Prefill a prompt, decode it on a stream, fork it, decode both branches in the same frames, release.
//   npm install --prefix client/examples/node && node client/examples/node/fork.js [TARGET]
"use strict";
const path = require("path"), grpc = require("@grpc/grpc-js"), { loadSync } = require("@grpc/proto-loader");
const protos = path.join(__dirname, "../../../protos");
const definition = loadSync(["ferrule/v1/executor.proto", "ferrule/v1/tokenizer.proto"], {
  includeDirs: [protos, path.join(protos, "third_party")], defaults: true, longs: String, enums: String,
});
const { ModelExecutorService, TokenizerService } = grpc.loadPackageDefinition(definition).ferrule.v1;
const options = { "grpc.max_receive_message_length": 64 << 20, "grpc.keepalive_time_ms": 20_000 };
const [executor, tokenizer] = [ModelExecutorService, TokenizerService].map(
  (Service) => new Service(process.argv[2] ?? "127.0.0.1:50051", grpc.credentials.createInsecure(), options));
// A call that names a handle says which server has it, for the proxy on the way; an empty one goes to any server.
const toOwner = (handle) => {
  const metadata = new grpc.Metadata();
  if (handle) metadata.set("ferrule-instance", handle.cacheId.split(".")[0]);
  return metadata;
};
const call = (stub, name, request, handle) => new Promise((resolve, reject) => stub[name](
  request, toOwner(handle), { deadline: Date.now() + 30_000 }, (error, reply) => (error ? reject(error) : resolve(reply))));

async function main() {
  const { tokenIds } = await call(tokenizer, "Encode", { text: "def read_file(path):" });
  const prompt = { inputIds: tokenIds, logitsPolicy: { greedyArgmax: {} }, requestId: crypto.randomUUID() };
  const { output: trunk } = await call(executor, "Prefill", { input: prompt });
  const stream = executor.StreamDecode(toOwner(trunk.kvCache));
  const frames = stream[Symbol.asyncIterator]();
  // One frame moves every branch by the token that was chosen for it, and has the next one chosen.
  async function step(branches) {
    const items = branches.map(({ tokens, handle, policy }, seq) => (
      { seq, decode: { inputIds: tokens.slice(-1), kvCache: handle, logitsPolicy: policy } }));
    stream.write({ items });
    for (let missing = items.length; missing > 0;) {
      for (const { seq, decode, error } of (await frames.next()).value.results) {
        if (error) throw new Error(error.message); // a google.rpc.Status; the other items of the frame went on
        branches[seq].handle = decode.kvCache;
        branches[seq].tokens.push(...decode.outputs.tokens);
        missing--;
      }
    }
  }
  const first = { tokens: [...trunk.outputs.tokens], handle: trunk.kvCache, policy: { greedyArgmax: {} } };
  for (let i = 0; i < 4; i++) await step([first]);
  const { kvCaches } = await call(executor, "ForkCache", { kvCache: first.handle, count: 2 }, first.handle);
  const branches = kvCaches.map((handle, seed) => (
    { tokens: [...first.tokens], handle, policy: { sample: { temperature: 0.8, seed } } }));
  for (let i = 0; i < 8; i++) await step(branches);
  for (const { tokens } of branches) console.log((await call(tokenizer, "Decode", { tokenIds: tokens })).text + "\n--");
  stream.end();
  const { results } = await call(executor, "ReleaseCache", { kvCaches: [first.handle, ...kvCaches] }, first.handle);
  console.log(`released ${results.filter(({ released }) => released).length}`);
}

main().then(() => process.exit(0), (error) => { console.error(error.message); process.exit(1); });
