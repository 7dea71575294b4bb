// Prefill a prompt, decode it on a stream, fork it, decode both branches in the same frames, release.
// How to build it is in docs/clients.md; run it with the server's address, 127.0.0.1:50051 if there is none.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"strings"
	"time"

	ferrule "ferrule/v1"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
)

type branch struct {
	handle *ferrule.KvCacheHandle
	tokens []uint32 // the last one is chosen and not in the cache yet
	policy *ferrule.LogitsReturnPolicy
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// step moves every branch by the token that was chosen for it, in one frame, and has the next one chosen.
func step(stream ferrule.ModelExecutorService_StreamDecodeClient, branches ...*branch) {
	frame := &ferrule.StreamDecodeRequest{}
	for seq, b := range branches {
		decode := &ferrule.DecodeInput{InputIds: b.tokens[len(b.tokens)-1:], KvCache: b.handle, LogitsPolicy: b.policy}
		frame.Items = append(frame.Items, &ferrule.StreamItem{Seq: uint64(seq), Input: &ferrule.StreamItem_Decode{Decode: decode}})
	}
	must(stream.Send(frame))
	for missing := len(branches); missing > 0; {
		reply, err := stream.Recv()
		must(err)
		for _, result := range reply.Results {
			if result.GetError() != nil {
				log.Fatal(result.GetError().Message) // the other items of the frame went on
			}
			b, decode := branches[result.Seq], result.GetDecode()
			b.handle, b.tokens = decode.KvCache, append(b.tokens, decode.Outputs.Tokens...)
			missing--
		}
	}
}

func main() {
	target := "127.0.0.1:50051"
	if len(os.Args) > 1 {
		target = os.Args[1]
	}
	channel, err := grpc.Dial(target, grpc.WithInsecure(), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 20 * time.Second, Timeout: 20 * time.Second}))
	must(err)
	defer channel.Close()
	executor, tokenizer := ferrule.NewModelExecutorServiceClient(channel), ferrule.NewTokenizerServiceClient(channel)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()

	encoded, err := tokenizer.Encode(ctx, &ferrule.EncodeRequest{Text: "def read_file(path):"})
	must(err)
	greedy := &ferrule.LogitsReturnPolicy{Selection: &ferrule.LogitsReturnPolicy_GreedyArgmax{GreedyArgmax: &ferrule.GreedyArgmax{}}}
	prompt := &ferrule.PrefillInput{InputIds: encoded.TokenIds, LogitsPolicy: greedy, RequestId: fmt.Sprint(time.Now().UnixNano())}
	prefilled, err := executor.Prefill(ctx, &ferrule.PrefillRequest{Input: prompt})
	must(err)
	trunk := &branch{prefilled.Output.KvCache, prefilled.Output.Outputs.Tokens, greedy}

	// Says which server has the handles, for the proxy on the way.
	ctx = metadata.AppendToOutgoingContext(ctx, "ferrule-instance", strings.SplitN(trunk.handle.CacheId, ".", 2)[0])
	stream, err := executor.StreamDecode(ctx)
	must(err)
	for i := 0; i < 4; i++ {
		step(stream, trunk)
	}
	forked, err := executor.ForkCache(ctx, &ferrule.ForkCacheRequest{KvCache: trunk.handle, Count: proto.Uint32(2)})
	must(err)
	var branches []*branch
	for seed, handle := range forked.KvCaches {
		sample := &ferrule.Sample{Temperature: proto.Float32(0.8), Seed: proto.Uint64(uint64(seed))}
		policy := &ferrule.LogitsReturnPolicy{Selection: &ferrule.LogitsReturnPolicy_Sample{Sample: sample}}
		branches = append(branches, &branch{handle, append([]uint32{}, trunk.tokens...), policy})
	}
	for i := 0; i < 8; i++ {
		step(stream, branches...)
	}
	for _, b := range branches {
		text, err := tokenizer.Decode(ctx, &ferrule.TokenizerServiceDecodeRequest{TokenIds: b.tokens})
		must(err)
		fmt.Printf("%s\n--\n", text.Text)
	}
	must(stream.CloseSend())
	released, err := executor.ReleaseCache(ctx, &ferrule.ReleaseCacheRequest{KvCaches: append(forked.KvCaches, trunk.handle)})
	must(err)
	count := 0
	for _, result := range released.Results {
		if result.Released {
			count++
		}
	}
	fmt.Printf("released %d\n", count)
}
