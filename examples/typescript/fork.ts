// Prefill a prompt, decode it on a stream, fork it, decode both branches in the same frames, release.
import { randomUUID } from "node:crypto";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import * as grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import type { ProtoGrpcType as Executor } from "./types/executor.js";
import type { ProtoGrpcType as Tokenizer } from "./types/tokenizer.js";
import type { KvCacheHandle } from "./types/ferrule/v1/KvCacheHandle.js";
import type { LogitsReturnPolicy } from "./types/ferrule/v1/LogitsReturnPolicy.js";
import type { StreamDecodeResponse__Output } from "./types/ferrule/v1/StreamDecodeResponse.js";
import type { StreamResult__Output } from "./types/ferrule/v1/StreamResult.js";

const protos = fileURLToPath(new URL("../../../protos", import.meta.url)); // from dist/
const { ModelExecutorService, TokenizerService } = (grpc.loadPackageDefinition(loadSync(
  ["ferrule/v1/executor.proto", "ferrule/v1/tokenizer.proto"],
  { includeDirs: [protos, `${protos}/third_party`], defaults: true, longs: String, enums: String },
)) as unknown as Executor & Tokenizer).ferrule.v1;

let owner = ""; // names the server that has the handles, for the proxy on the way
const prepare: grpc.Interceptor = (options, next) => {
  const isStream = options.method_definition.responseStream;
  return new grpc.InterceptingCall(next(isStream ? options : { ...options, deadline: Date.now() + 30_000 }), {
    start(metadata, listener, start) {
      if (owner) metadata.set("ferrule-instance", owner);
      start(metadata, listener);
    },
  });
};
const [target, credentials] = [process.argv[2] ?? "127.0.0.1:50051", grpc.credentials.createInsecure()];
const executor = new ModelExecutorService(target, credentials, { interceptors: [prepare] });
const tokenizer = new TokenizerService(target, credentials, { interceptors: [prepare] });

/** What a reply must have; a message that is not there is null. */
function given<T>(value: T | null | undefined): T {
  if (value == null) throw new Error("the reply lacks a field");
  return value;
}
interface Branch { handle: KvCacheHandle; tokens: number[]; policy: LogitsReturnPolicy }

const text = { text: "def read_file(path):", addBeginTokens: true };
const encoded = given(await promisify(tokenizer.Tokenize.bind(tokenizer))(text));
const policy = { greedyArgmax: {} };
const prompt = { inputIds: encoded.tokenIds, logitsPolicy: policy, requestId: randomUUID() };
const output = given(given(await promisify(executor.Prefill.bind(executor))({ input: prompt })).output);
const trunk: Branch = { handle: given(output.kvCache), tokens: given(output.outputs).tokens, policy };
owner = given(trunk.handle.instance);
const stream = executor.StreamDecode(); // its answers: one for each item, in any order, in any number of frames
const answers = (async function* (): AsyncGenerator<StreamResult__Output, undefined> {
  for await (const { results } of stream as AsyncIterable<StreamDecodeResponse__Output>) yield* results;
})();

/** Moves every branch by the token that was chosen for it, in one frame, and has the next one chosen. */
async function step(...branches: Branch[]): Promise<void> {
  stream.write({ items: branches.map(({ handle, tokens, policy }, seq) => (
    { seq, decode: { inputIds: tokens.slice(-1), kvCache: handle, logitsPolicy: policy } })) });
  for (const _ of branches) {
    const { seq, decode, error } = given((await answers.next()).value);
    if (error) throw new Error(error.message); // a google.rpc.Status; the other items of the frame went on
    const branch = given(branches[seq]);
    branch.handle = given(decode?.kvCache);
    branch.tokens.push(...given(decode?.outputs).tokens);
  }
}
for (let i = 0; i < 4; i++) await step(trunk);
const fork = { kvCache: trunk.handle, count: 2 };
const { kvCaches } = given(await promisify(executor.ForkCache.bind(executor))(fork));
const branches: Branch[] = kvCaches.map((handle, seed) => (
  { handle, tokens: [...trunk.tokens], policy: { sample: { temperature: 0.8, seed } } }));
for (let i = 0; i < 8; i++) await step(...branches);
for (const { tokens } of branches) {
  console.log(given(await promisify(tokenizer.Detokenize.bind(tokenizer))({ tokenIds: tokens })).text + "\n--");
}
stream.end();
const release = { kvCaches: [trunk, ...branches].map(({ handle }) => handle) };
const { results } = given(await promisify(executor.ReleaseCache.bind(executor))(release));
console.log(`released ${results.filter(({ released }) => released).length}`);
executor.close(), tokenizer.close();
