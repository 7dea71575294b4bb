// Runs the steps of conformance cases with grpc-go; the protocol is in tests/conformance/README.md.
package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	_ "ferrule.internal/go/ferrule/v1" // registers the messages and services of the contract

	_ "google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	_ "google.golang.org/grpc/encoding/gzip" // registers the compressor
	_ "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

const deadline = 20 * time.Second
const limit = 64 << 20

var channels = map[string]*grpc.ClientConn{}

var stream struct {
	grpc.ClientStream
	method protoreflect.MethodDescriptor
	cancel context.CancelFunc
}

// must ends the runner: what fails here is the runner, not the server.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

func methodOf(name string) protoreflect.MethodDescriptor {
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(strings.Replace(name, "/", ".", 1)))
	must(err)
	return found.(protoreflect.MethodDescriptor)
}

func newMessage(kind protoreflect.MessageDescriptor) proto.Message {
	found, err := protoregistry.GlobalTypes.FindMessageByName(kind.FullName())
	must(err)
	return found.New().Interface()
}

func parse(text string, kind protoreflect.MessageDescriptor) proto.Message {
	message := newMessage(kind)
	must(protojson.Unmarshal([]byte(text), message))
	return message
}

func line(kind string, message proto.Message) string {
	text, err := protojson.Marshal(message)
	must(err)
	return kind + "\t" + string(text)
}

// end tells how a call ended; a nil error, and io.EOF of a stream, is OK.
func end(err error) string {
	if err == nil || err.Error() == "EOF" {
		return "end\t{}"
	}
	return line("end", status.Convert(err).Proto())
}

func channel(target string) *grpc.ClientConn {
	if channels[target] == nil {
		made, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(limit), grpc.MaxCallSendMsgSize(limit)))
		must(err)
		channels[target] = made
	}
	return channels[target]
}

// options returns the options of a call; "grpc-encoding" is no metadata: it says how the request is compressed.
func options(pairs []string) []grpc.CallOption {
	if len(pairs) > 0 && pairs[0] == "grpc-encoding" {
		return []grpc.CallOption{grpc.UseCompressor(pairs[1])}
	}
	return nil
}

func newContext(pairs []string) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	if len(options(pairs)) > 0 {
		pairs = pairs[2:]
	}
	return metadata.AppendToOutgoingContext(ctx, pairs...), cancel
}

func unary(target, name, request string, pairs []string) string {
	method := methodOf(name)
	ctx, cancel := newContext(pairs)
	defer cancel()
	reply := newMessage(method.Output())
	message := parse(request, method.Input())
	if err := channel(target).Invoke(ctx, "/"+name, message, reply, options(pairs)...); err != nil {
		return end(err)
	}
	return line("message", reply)
}

func open(target, name string, pairs []string) string {
	stream.method = methodOf(name)
	ctx, cancel := newContext(pairs)
	kind := &grpc.StreamDesc{ClientStreams: stream.method.IsStreamingClient(), ServerStreams: true}
	call, err := channel(target).NewStream(ctx, kind, "/"+name, options(pairs)...)
	must(err)
	stream.ClientStream, stream.cancel = call, cancel
	return "ok"
}

func send(request string) string {
	_ = stream.SendMsg(parse(request, stream.method.Input())) // an error here is told by receive
	return "ok"
}

func receive() string {
	reply := newMessage(stream.method.Output())
	if err := stream.RecvMsg(reply); err != nil {
		return end(err)
	}
	return line("message", reply)
}

func answer(command string, fields []string) string {
	switch command {
	case "unary":
		return unary(fields[0], fields[1], fields[2], fields[3:])
	case "open":
		return open(fields[0], fields[1], fields[2:])
	case "send":
		return send(fields[0])
	case "receive":
		return receive()
	case "close":
		must(stream.CloseSend())
	case "cancel":
		stream.cancel()
	}
	return "ok"
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, limit)
	for lines.Scan() {
		fields := strings.Split(lines.Text(), "\t")
		fmt.Println(answer(fields[0], fields[1:]))
	}
}
