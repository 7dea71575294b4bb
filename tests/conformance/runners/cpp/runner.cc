// Runs the steps of conformance cases with gRPC C++; the protocol is in tests/conformance/README.md.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/util/json_util.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <chrono>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace pb = google::protobuf;
using Fields = std::vector<std::string>;
using Message = std::unique_ptr<pb::Message>;

constexpr int kLimit = 64 << 20;
constexpr std::chrono::seconds kDeadline{20};

[[noreturn]] void Fail(const std::string& what) {
  std::cerr << what << std::endl;
  std::exit(1);
}

// A call as commands come: what begins is awaited at once, so one queue serves all of it.
class Call {
 public:
  Call(const std::string& target, const std::string& name, const Fields& pairs) : method_(Find(name)) {
    context_.set_deadline(std::chrono::system_clock::now() + kDeadline);
    for (size_t i = 0; i + 1 < pairs.size(); i += 2) {
      // "grpc-encoding" is no metadata: it says how the request is compressed.
      if (pairs[i] == "grpc-encoding") context_.set_compression_algorithm(GRPC_COMPRESS_GZIP);
      else context_.AddMetadata(pairs[i], pairs[i + 1]);
    }
    call_ = Stub(target).PrepareCall(&context_, "/" + name, &queue_);
    call_->StartCall(this);
    Wait();
  }

  void Send(const std::string& json) {
    Message message = New(method_->input_type());
    auto parsed = pb::util::JsonStringToMessage(json, message.get());
    if (!parsed.ok()) Fail(parsed.ToString());
    grpc::ByteBuffer bytes;
    bool own = false;
    grpc::SerializationTraits<pb::Message>::Serialize(*message, &bytes, &own);
    call_->Write(bytes, this);
    Wait();
  }

  void Close() {
    call_->WritesDone(this);
    Wait();
  }

  void Cancel() { context_.TryCancel(); }

  // The next frame as a line, or how the call ended.
  std::string Receive() {
    grpc::ByteBuffer bytes;
    call_->Read(&bytes, this);
    if (!Wait()) return End();
    Message message = New(method_->output_type());
    grpc::SerializationTraits<pb::Message>::Deserialize(&bytes, message.get());
    return "message\t" + Json(*message);
  }

 private:
  static const pb::MethodDescriptor* Find(std::string name) {
    name[name.find('/')] = '.';
    const auto* found = pb::DescriptorPool::generated_pool()->FindMethodByName(name);
    if (found == nullptr) Fail("no method " + name);
    return found;
  }

  static Message New(const pb::Descriptor* type) {
    return Message(pb::MessageFactory::generated_factory()->GetPrototype(type)->New());
  }

  static std::string Json(const pb::Message& message) {
    std::string text;
    auto written = pb::util::MessageToJsonString(message, &text);
    if (!written.ok()) Fail(written.ToString());
    return text;
  }

  static grpc::GenericStub& Stub(const std::string& target) {
    static std::map<std::string, std::unique_ptr<grpc::GenericStub>> stubs;
    auto& stub = stubs[target];
    if (stub == nullptr) {
      grpc::ChannelArguments arguments;
      arguments.SetMaxReceiveMessageSize(kLimit);
      arguments.SetMaxSendMessageSize(kLimit);
      stub = std::make_unique<grpc::GenericStub>(
          grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments));
    }
    return *stub;
  }

  bool Wait() {
    void* tag;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }

  std::string End() {
    grpc::Status status;
    call_->Finish(&status, this);
    Wait();
    google::rpc::Status rpc;
    rpc.set_code(status.error_code());
    rpc.set_message(status.error_message());
    if (!status.error_details().empty() && !rpc.ParseFromString(status.error_details())) Fail("no google.rpc.Status");
    return "end\t" + Json(rpc);
  }

  const pb::MethodDescriptor* method_;
  grpc::CompletionQueue queue_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
};

std::string Unary(const Fields& fields) {
  Call call(fields[1], fields[2], Fields(fields.begin() + 4, fields.end()));
  call.Send(fields[3]);
  call.Close();
  return call.Receive();
}

std::string Answer(const Fields& fields, std::unique_ptr<Call>& stream) {
  const std::string& command = fields[0];
  if (command == "unary") return Unary(fields);
  if (command == "open") stream = std::make_unique<Call>(fields[1], fields[2], Fields(fields.begin() + 3, fields.end()));
  if (command == "send") stream->Send(fields[1]);
  if (command == "close") stream->Close();
  if (command == "cancel") stream->Cancel();
  return command == "receive" ? stream->Receive() : "ok";
}

int main() {
  google::rpc::ErrorInfo::default_instance();  // links the details that a status may carry
  std::unique_ptr<Call> stream;
  for (std::string line; std::getline(std::cin, line);) {
    Fields fields;
    std::istringstream text(line + '\t');  // so that a last field that is empty is one, too
    for (std::string field; std::getline(text, field, '\t');) fields.push_back(field);
    std::cout << Answer(fields, stream) << std::endl;
  }
}
