// Prefill a prompt, decode it on a stream, fork it, decode both branches, release.
package main

//go:generate sh -c "protoc -I../../protos -I../../protos/third_party --go_out=. --go_opt=module=ferrule.internal/go --go-grpc_out=. --go-grpc_opt=module=ferrule.internal/go ../../protos/ferrule/v1/*.proto"

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	ferrule "ferrule.internal/go/ferrule/v1"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
)

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}

// decode moves a sequence by the token that was chosen for it, again and again, and returns what is chosen on the way.
func decode(stream ferrule.ModelExecutorService_StreamDecodeClient, next *ferrule.DecodeInput, steps int) (chosen []uint32) {
	for ; steps > 0; steps-- {
		item := &ferrule.StreamItem{Input: &ferrule.StreamItem_Decode{Decode: next}}  // a frame could move many sequences
		stream.Send(&ferrule.StreamDecodeRequest{Items: []*ferrule.StreamItem{item}}) // where it fails, Recv says why
		result := must(stream.Recv()).Results[0]
		if result.GetError() != nil {
			log.Fatal(result.GetError().Message)
		}
		next.KvCache, next.InputIds = result.GetDecode().KvCache, result.GetDecode().Outputs.Tokens
		chosen = append(chosen, next.InputIds...)
	}
	return chosen
}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	target := append(os.Args, "127.0.0.1:50051")[1]
	channel := must(grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials())))
	executor, tokenizer := ferrule.NewModelExecutorServiceClient(channel), ferrule.NewTokenizerServiceClient(channel)

	ids := must(tokenizer.Tokenize(ctx, &ferrule.TokenizeRequest{Text: "def read_file(path):", AddBeginTokens: true})).TokenIds
	policy := &ferrule.LogitsReturnPolicy{Selection: &ferrule.LogitsReturnPolicy_GreedyArgmax{GreedyArgmax: &ferrule.GreedyArgmax{}}}
	prompt := &ferrule.PrefillInput{InputIds: ids, LogitsPolicy: policy, RequestId: fmt.Sprint(time.Now().UnixNano())}
	first := must(executor.Prefill(ctx, &ferrule.PrefillRequest{Input: prompt})).Output
	trunk := &ferrule.DecodeInput{InputIds: first.Outputs.Tokens, KvCache: first.KvCache, LogitsPolicy: policy}
	// Names the server that has the handles, for the proxy on the way.
	ctx = metadata.AppendToOutgoingContext(ctx, "ferrule-instance", first.KvCache.Instance)
	stream := must(executor.StreamDecode(ctx))
	tokens := append(first.Outputs.Tokens, decode(stream, trunk, 4)...)

	forked := must(executor.ForkCache(ctx, &ferrule.ForkCacheRequest{KvCache: trunk.KvCache, Count: proto.Uint32(2)}))
	handles := []*ferrule.KvCacheHandle{trunk.KvCache}
	for seed, handle := range forked.KvCaches {
		sample := &ferrule.Sample{Temperature: proto.Float32(0.8), Seed: proto.Uint64(uint64(seed))}
		policy := &ferrule.LogitsReturnPolicy{Selection: &ferrule.LogitsReturnPolicy_Sample{Sample: sample}}
		branch := &ferrule.DecodeInput{InputIds: trunk.InputIds, KvCache: handle, LogitsPolicy: policy}
		whole := append(tokens[:len(tokens):len(tokens)], decode(stream, branch, 8)...)
		fmt.Println(must(tokenizer.Detokenize(ctx, &ferrule.DetokenizeRequest{TokenIds: whole})).Text + "\n--")
		handles = append(handles, branch.KvCache)
	}
	count := 0
	for _, result := range must(executor.ReleaseCache(ctx, &ferrule.ReleaseCacheRequest{KvCaches: handles})).Results {
		if result.Released {
			count++
		}
	}
	fmt.Println("released", count)
}
