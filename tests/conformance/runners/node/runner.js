// Runs the steps of conformance cases with @grpc/grpc-js; the protocol is in tests/conformance/README.md.
"use strict";
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const { root, protobuf } = loadProtobuf();

const OPTIONS = { longs: String, enums: String, bytes: String, json: true };
const DEADLINE_MS = 20_000;
const LIMITS = { "grpc.max_receive_message_length": 64 << 20, "grpc.max_send_message_length": 64 << 20 };
const GZIP = grpc.compressionAlgorithms.gzip;
const channels = new Map();
let stream = null;

/** The contract, from its .proto files; durations and timestamps as proto3 JSON writes them. */
function loadProtobuf() {
  const protobuf = require(require.resolve("protobufjs", { paths: [require.resolve("@grpc/proto-loader")] }));
  const keep = function (value) { return this.fromObject(value); };
  protobuf.wrappers[".google.protobuf.Duration"] = {
    fromObject: keep,
    toObject: ({ seconds, nanos }) => `${seconds}${nanos ? "." + String(nanos).padStart(9, "0") : ""}s`,
  };
  protobuf.wrappers[".google.protobuf.Timestamp"] = {
    fromObject: keep,
    toObject: ({ seconds, nanos }) => new Date(Number(seconds) * 1000 + nanos / 1e6).toISOString(),
  };
  const [protos, ...files] = process.argv.slice(2);
  const root = new protobuf.Root();
  root.resolvePath = (origin, target) => {
    const found = [protos, `${protos}/third_party`].map((dir) => `${dir}/${target}`);
    return require("fs").existsSync(target) ? target : found.find((path) => require("fs").existsSync(path)) ?? target;
  };
  loader.loadSync([], {}); // registers the well-known types that protobufjs does not bring
  root.loadSync(files, { keepCase: false }).resolveAll();
  return { root, protobuf };
}

/** A request with its durations as protobufjs wants them: "1.5s" is {seconds, nanos}. */
function withDurations(type, value) {
  if (type.fullName === ".google.protobuf.Duration") {
    const [seconds, fraction = ""] = value.replace(/s$/, "").split(".");
    return { seconds, nanos: Number(fraction.padEnd(9, "0")) };
  }
  return Object.fromEntries(Object.entries(value).map(([name, held]) => {
    const field = type.fields[name];
    if (!field) throw new Error(`${type.fullName} has no field ${name}`);
    if (!(field.resolvedType instanceof protobuf.Type) || field.map) return [name, held];
    const convert = (one) => withDurations(field.resolvedType, one);
    return [name, field.repeated ? held.map(convert) : convert(held)];
  }));
}

function definitionOf(name) {
  const [service, method] = name.split("/");
  const { requestType, responseType } = root.lookupService(service).methods[method];
  const [request, response] = [root.lookupType(requestType), root.lookupType(responseType)];
  return {
    path: `/${name}`,
    serialize: (value) => Buffer.from(request.encode(request.fromObject(withDurations(request, value))).finish()),
    deserialize: (bytes) => response.toObject(response.decode(bytes), OPTIONS),
  };
}

/** The channel of a call; "grpc-encoding" is no metadata: what it says is an option of the channel. */
function channel(target, pairs) {
  const isPacked = pairs[0] === "grpc-encoding";
  const key = `${target} ${isPacked}`;
  const options = isPacked ? { ...LIMITS, "grpc.default_compression_algorithm": GZIP } : LIMITS;
  if (!channels.has(key)) channels.set(key, new grpc.Client(target, grpc.credentials.createInsecure(), options));
  return channels.get(key);
}

function metadataOf(pairs) {
  const metadata = new grpc.Metadata();
  for (let i = 0; i < pairs.length; i += 2) if (pairs[i] !== "grpc-encoding") metadata.add(pairs[i], pairs[i + 1]);
  return metadata;
}

/** The line that tells how a call ended: google.rpc.Status as JSON. */
function end({ code, details, metadata }) {
  const Status = root.lookupType("google.rpc.Status");
  const [packed] = metadata?.get("grpc-status-details-bin") ?? [];
  const status = packed ? Status.toObject(Status.decode(packed), OPTIONS) : { code, message: details };
  return `end\t${JSON.stringify(status)}`;
}

function unary(target, name, request, ...pairs) {
  const { path, serialize, deserialize } = definitionOf(name);
  const options = { deadline: Date.now() + DEADLINE_MS };
  return new Promise((resolve) => channel(target, pairs).makeUnaryRequest(
    path, serialize, deserialize, JSON.parse(request), metadataOf(pairs), options,
    (error, reply) => resolve(error ? end(error) : `message\t${JSON.stringify(reply)}`)));
}

function open(target, name, ...pairs) {
  const { path, serialize, deserialize } = definitionOf(name);
  const options = { deadline: Date.now() + DEADLINE_MS };
  const call = channel(target, pairs).makeBidiStreamRequest(path, serialize, deserialize, metadataOf(pairs), options);
  stream = { call, lines: [], waiting: null };
  const tell = (line) => {
    if (!stream.waiting) return void stream.lines.push(line);
    stream.waiting(line);
    stream.waiting = null;
  };
  call.on("data", (reply) => tell(`message\t${JSON.stringify(reply)}`));
  call.on("error", () => {}); // the status tells
  call.on("status", (status) => tell(end(status)));
  return "ok";
}

const commands = {
  unary, open,
  send: (request) => (stream.call.write(JSON.parse(request)), "ok"),
  close: () => (stream.call.end(), "ok"),
  cancel: () => (stream.call.cancel(), "ok"),
  receive: () => stream.lines.shift() ?? new Promise((resolve) => (stream.waiting = resolve)),
};

(async () => {
  for await (const line of require("readline").createInterface({ input: process.stdin })) {
    const [command, ...fields] = line.split("\t");
    process.stdout.write(`${await commands[command](...fields)}\n`);
  }
  process.exit(0);
})();
