// Prefill a prompt, decode it on a stream, fork it, decode both branches in the same frames, release.
import { randomUUID } from "node:crypto";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const protos = fileURLToPath(new URL("../../protos", import.meta.url));
const { ModelExecutorService, TokenizerService } = grpc.loadPackageDefinition(loadSync(
  ["ferrule/v1/executor.proto", "ferrule/v1/tokenizer.proto"],
  { includeDirs: [protos, `${protos}/third_party`], defaults: true, longs: String, enums: String })).ferrule.v1;
const connect = (Service) => new Service(process.argv[2] ?? "127.0.0.1:50051", grpc.credentials.createInsecure());
const executor = connect(ModelExecutorService), tokenizer = connect(TokenizerService);
const owner = new grpc.Metadata(); // names the server that has the handles, for the proxy on the way
const call = (stub, name, request) => new Promise((resolve, reject) => stub[name](
  request, owner, { deadline: Date.now() + 30_000 }, (error, reply) => (error ? reject(error) : resolve(reply))));

const { tokenIds } = await call(tokenizer, "Tokenize", { text: "def read_file(path):", addBeginTokens: true });
const policy = { greedyArgmax: {} };
const prompt = { inputIds: tokenIds, logitsPolicy: policy, requestId: randomUUID() };
const { output } = await call(executor, "Prefill", { input: prompt });
const trunk = { handle: output.kvCache, tokens: output.outputs.tokens, policy };
owner.set("ferrule-instance", trunk.handle.instance);
const stream = executor.StreamDecode(owner); // its answers: one for each item, in any order, in any number of frames
const answers = (async function* () { for await (const { results } of stream) yield* results; })();

// Moves every branch by the token that was chosen for it, in one frame, and has the next one chosen.
async function step(...branches) {
  stream.write({ items: branches.map(({ handle, tokens, policy }, seq) => (
    { seq, decode: { inputIds: tokens.slice(-1), kvCache: handle, logitsPolicy: policy } })) });
  for (let i = 0; i < branches.length; i++) {
    const { seq, decode, error } = (await answers.next()).value;
    if (error) throw new Error(error.message); // a google.rpc.Status; the other items of the frame went on
    branches[seq].handle = decode.kvCache;
    branches[seq].tokens.push(...decode.outputs.tokens);
  }
}
for (let i = 0; i < 4; i++) await step(trunk);
const { kvCaches } = await call(executor, "ForkCache", { kvCache: trunk.handle, count: 2 });
const branches = kvCaches.map((handle, seed) => (
  { handle, tokens: [...trunk.tokens], policy: { sample: { temperature: 0.8, seed } } }));
for (let i = 0; i < 8; i++) await step(...branches);
for (const { tokens } of branches) console.log((await call(tokenizer, "Detokenize", { tokenIds: tokens })).text + "\n--");
stream.end();
const { results } = await call(executor, "ReleaseCache", { kvCaches: [trunk.handle, ...kvCaches] });
console.log(`released ${results.filter(({ released }) => released).length}`);
executor.close(), tokenizer.close();
