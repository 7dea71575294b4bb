// Prefill a prompt, decode it on a stream, fork it, decode both branches in the same frames, release.
// How to build it is in docs/clients.md; run it with the server's address, 127.0.0.1:50051 if there is none.
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "ferrule/v1/executor.grpc.pb.h"
#include "ferrule/v1/tokenizer.grpc.pb.h"

using namespace ferrule::v1;
using Stream = grpc::ClientReaderWriter<StreamDecodeRequest, StreamDecodeResponse>;

struct Branch {
  KvCacheHandle handle;
  std::vector<uint32_t> tokens;  // the last one is chosen and not in the cache yet
  LogitsReturnPolicy policy;
};

// A context for one call: a deadline and, for the proxy on the way, which server has the handle.
struct Context : grpc::ClientContext {
  explicit Context(const KvCacheHandle* handle = nullptr) {
    set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    if (handle) AddMetadata("ferrule-instance", handle->cache_id().substr(0, handle->cache_id().find('.')));
  }
};

void Check(bool ok, const std::string& what) {
  if (ok) return;
  std::cerr << what << std::endl;
  std::exit(1);
}

// Moves every branch by the token that was chosen for it, in one frame, and has the next one chosen.
void Step(Stream& stream, const std::vector<Branch*>& branches) {
  StreamDecodeRequest frame;
  for (size_t seq = 0; seq < branches.size(); ++seq) {
    auto* item = frame.add_items();
    item->set_seq(seq);
    item->mutable_decode()->add_input_ids(branches[seq]->tokens.back());
    *item->mutable_decode()->mutable_kv_cache() = branches[seq]->handle;
    *item->mutable_decode()->mutable_logits_policy() = branches[seq]->policy;
  }
  stream.Write(frame);
  StreamDecodeResponse reply;
  for (size_t missing = branches.size(); missing > 0; missing -= reply.results_size()) {
    Check(stream.Read(&reply), "the stream ended");
    for (const auto& result : reply.results()) {
      Check(result.has_decode(), result.error().message());  // the other items of the frame went on
      Branch& branch = *branches[result.seq()];
      branch.handle = result.decode().kv_cache();
      for (uint32_t token : result.decode().outputs().tokens()) branch.tokens.push_back(token);
    }
  }
}

int main(int argc, char** argv) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(64 << 20);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
  const std::string target = argc > 1 ? argv[1] : "127.0.0.1:50051";
  auto channel = grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
  auto executor = ModelExecutorService::NewStub(channel);
  auto tokenizer = TokenizerService::NewStub(channel);
  auto check = [](const grpc::Status& status) { Check(status.ok(), status.error_message()); };

  EncodeRequest text;
  text.set_text("def read_file(path):");
  EncodeResponse encoded;
  Context encode;
  check(tokenizer->Encode(&encode, text, &encoded));
  PrefillRequest prompt;
  *prompt.mutable_input()->mutable_input_ids() = encoded.token_ids();
  prompt.mutable_input()->mutable_logits_policy()->mutable_greedy_argmax();
  prompt.mutable_input()->set_request_id(std::to_string(std::random_device{}()));
  PrefillResponse prefilled;
  Context prefill;
  check(executor->Prefill(&prefill, prompt, &prefilled));
  const auto& first = prefilled.output().outputs().tokens();
  Branch trunk{prefilled.output().kv_cache(), {first.begin(), first.end()}, prompt.input().logits_policy()};

  Context streaming(&trunk.handle);
  auto stream = executor->StreamDecode(&streaming);
  for (int i = 0; i < 4; ++i) Step(*stream, {&trunk});
  ForkCacheRequest fork;
  *fork.mutable_kv_cache() = trunk.handle;
  fork.set_count(2);
  ForkCacheResponse forked;
  Context forking(&trunk.handle);
  check(executor->ForkCache(&forking, fork, &forked));
  Branch left{forked.kv_caches(0), trunk.tokens, {}}, right{forked.kv_caches(1), trunk.tokens, {}};
  for (Branch* branch : {&left, &right}) {
    branch->policy.mutable_sample()->set_temperature(0.8);
    branch->policy.mutable_sample()->set_seed(branch == &right);
  }
  for (int i = 0; i < 8; ++i) Step(*stream, {&left, &right});
  ReleaseCacheRequest release;
  *release.add_kv_caches() = trunk.handle;
  for (Branch* branch : {&left, &right}) {
    *release.add_kv_caches() = branch->handle;
    TokenizerServiceDecodeRequest ids;
    ids.mutable_token_ids()->Add(branch->tokens.begin(), branch->tokens.end());
    TokenizerServiceDecodeResponse decoded;
    Context decode;
    check(tokenizer->Decode(&decode, ids, &decoded));
    std::cout << decoded.text() << "\n--\n";
  }
  stream->WritesDone();
  check(stream->Finish());
  ReleaseCacheResponse released;
  Context releasing(&trunk.handle);
  check(executor->ReleaseCache(&releasing, release, &released));
  int count = 0;
  for (const auto& result : released.results()) count += result.released();
  std::cout << "released " << count << std::endl;
}
