// Prefill a prompt, decode it on a stream, fork it, decode both branches, release.
#include <grpcpp/grpcpp.h>

#include <iostream>
#include <random>

#include "ferrule/v1/executor.grpc.pb.h"
#include "ferrule/v1/tokenizer.grpc.pb.h"

using namespace ferrule::v1;
using Executor = ModelExecutorService;
using Stream = grpc::ClientReaderWriter<StreamDecodeRequest, StreamDecodeResponse>;
using Tokens = google::protobuf::RepeatedField<uint32_t>;

[[noreturn]] void Fail(const std::string& message) {
  std::cerr << message << std::endl;
  std::exit(1);
}

std::string owner;  // names the server that has the handles, for the proxy on the way

template <class Stub, class Request, class Reply>
Reply Call(Stub& stub, grpc::Status (Stub::*rpc)(grpc::ClientContext*, const Request&, Reply*), const Request& sent) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  if (!owner.empty()) context.AddMetadata("ferrule-instance", owner);
  Reply reply;
  if (auto status = (stub.*rpc)(&context, sent, &reply); !status.ok()) Fail(status.error_message());
  return reply;
}

// Moves a sequence by the token that was chosen for it, again and again, and adds what is chosen on the way.
void Decode(Stream& stream, int steps, DecodeInput& next, Tokens& tokens) {
  for (; steps > 0; --steps) {
    StreamDecodeRequest frame;  // could move many sequences
    *frame.add_items()->mutable_decode() = next;
    StreamDecodeResponse reply;
    if (!stream.Write(frame) || !stream.Read(&reply)) Fail(stream.Finish().error_message());
    if (reply.results(0).has_error()) Fail(reply.results(0).error().message());
    *next.mutable_kv_cache() = reply.results(0).decode().kv_cache();
    *next.mutable_input_ids() = reply.results(0).decode().outputs().tokens();
    tokens.MergeFrom(next.input_ids());
  }
}

int main(int argc, char** argv) {
  auto channel = grpc::CreateChannel(argc > 1 ? argv[1] : "127.0.0.1:50051", grpc::InsecureChannelCredentials());
  auto executor = Executor::NewStub(channel);
  auto tokenizer = TokenizerService::NewStub(channel);
  TokenizeRequest text;
  text.set_text("def read_file(path):");
  text.set_add_begin_tokens(true);
  PrefillRequest prompt;
  *prompt.mutable_input()->mutable_input_ids() = Call(*tokenizer, &TokenizerService::Stub::Tokenize, text).token_ids();
  prompt.mutable_input()->mutable_logits_policy()->mutable_greedy_argmax();
  prompt.mutable_input()->set_request_id(std::to_string(std::random_device{}()));
  const auto first = Call(*executor, &Executor::Stub::Prefill, prompt).output();
  owner = first.kv_cache().instance();
  Tokens tokens = first.outputs().tokens();
  DecodeInput trunk;
  *trunk.mutable_kv_cache() = first.kv_cache();
  *trunk.mutable_input_ids() = tokens;
  *trunk.mutable_logits_policy() = prompt.input().logits_policy();
  grpc::ClientContext context;
  context.AddMetadata("ferrule-instance", owner);
  auto stream = executor->StreamDecode(&context);
  Decode(*stream, 4, trunk, tokens);
  ForkCacheRequest fork;
  *fork.mutable_kv_cache() = trunk.kv_cache();
  fork.set_count(2);
  ReleaseCacheRequest release;
  *release.add_kv_caches() = trunk.kv_cache();
  const auto forked = Call(*executor, &Executor::Stub::ForkCache, fork);
  for (const auto& handle : forked.kv_caches()) {
    DecodeInput branch = trunk;
    *branch.mutable_kv_cache() = handle;
    branch.mutable_logits_policy()->mutable_sample()->set_temperature(0.8);
    branch.mutable_logits_policy()->mutable_sample()->set_seed(release.kv_caches_size() - 1);
    DetokenizeRequest said;
    *said.mutable_token_ids() = tokens;
    Decode(*stream, 8, branch, *said.mutable_token_ids());
    std::cout << Call(*tokenizer, &TokenizerService::Stub::Detokenize, said).text() << "\n--\n";
    *release.add_kv_caches() = branch.kv_cache();
  }
  const auto released = Call(*executor, &Executor::Stub::ReleaseCache, release);
  int count = 0;
  for (const auto& result : released.results()) count += result.released();
  std::cout << "released " << count << std::endl;
  stream->WritesDone();
  if (auto status = stream->Finish(); !status.ok()) Fail(status.error_message());
}
