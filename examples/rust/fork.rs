//! Prefill a prompt, decode it on a stream, fork it, decode both branches in the same frames, release.
use ferrule::v1::logits_return_policy::Selection;
use ferrule::v1::model_executor_service_client::ModelExecutorServiceClient;
use ferrule::v1::tokenizer_service_client::TokenizerServiceClient;
use ferrule::v1::{stream_item::Input, stream_result::Result as Answer, *};
use std::sync::OnceLock;
use tokio::sync::mpsc::Sender;
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::interceptor::InterceptedService;
use tonic::{metadata::AsciiMetadataValue, transport::Endpoint, Request, Status, Streaming};

type Failure = Box<dyn std::error::Error>;

/// Names the server that has the handles, for the proxy on the way.
static OWNER: OnceLock<AsciiMetadataValue> = OnceLock::new();

fn with_owner(mut call: Request<()>) -> Result<Request<()>, Status> {
    if let Some(owner) = OWNER.get() {
        call.metadata_mut().insert("ferrule-instance", owner.clone());
    }
    Ok(call)
}

/// Moves every branch by the token that was chosen for it, in one frame, and has the next one chosen.
async fn step(
    frames: &Sender<StreamDecodeRequest>,
    answers: &mut Streaming<StreamDecodeResponse>,
    branches: &mut [(DecodeInput, Vec<u32>)],
) -> Result<(), Failure> {
    let moves = branches.iter().map(|(next, _)| Some(Input::Decode(next.clone())));
    let items = moves.enumerate().map(|(seq, input)| StreamItem { seq: seq as u32, input, ..Default::default() });
    frames.send(StreamDecodeRequest { items: items.collect(), ..Default::default() }).await?;
    let mut missing = branches.len(); // answers come in any order, in any number of frames
    while missing > 0 {
        for answer in answers.message().await?.ok_or("the stream ended")?.results {
            let decoded = match answer.result.ok_or("an empty answer")? {
                Answer::Decode(decoded) => decoded,
                other => return Err(format!("{other:?}").into()), // the other items of the frame went on
            };
            let (next, tokens) = &mut branches[answer.seq as usize];
            next.kv_cache = decoded.kv_cache;
            next.input_ids = decoded.outputs.ok_or("no outputs")?.tokens;
            tokens.extend(&next.input_ids);
            missing -= 1;
        }
    }
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let target = std::env::args().nth(1).unwrap_or("127.0.0.1:50051".into());
    let channel = Endpoint::from_shared(format!("http://{target}"))?.connect().await?;
    let mut tokenizer = TokenizerServiceClient::new(InterceptedService::new(channel.clone(), with_owner));
    let mut executor = ModelExecutorServiceClient::new(InterceptedService::new(channel, with_owner));
    let text = TokenizeRequest { text: "def read_file(path):".into(), add_begin_tokens: true, ..Default::default() };
    let input_ids = tokenizer.tokenize(text).await?.into_inner().token_ids;
    let policy = |selection| Some(LogitsReturnPolicy { selection: Some(selection), ..Default::default() });
    let logits_policy = policy(Selection::GreedyArgmax(GreedyArgmax::default()));
    let request_id = format!("{:?}", std::time::SystemTime::now());
    let input = PrefillInput { input_ids, request_id, logits_policy: logits_policy.clone(), ..Default::default() };
    let first =
        executor.prefill(PrefillRequest { input: Some(input) }).await?.into_inner().output.ok_or("no output")?;
    let kv_cache = first.kv_cache.ok_or("no handle")?;
    OWNER.set(kv_cache.instance.parse()?).expect("it is set once");
    let tokens = first.outputs.ok_or("no outputs")?.tokens;
    let next = DecodeInput { kv_cache: Some(kv_cache), input_ids: tokens.clone(), logits_policy, ..Default::default() };
    let mut branches = vec![(next, tokens)];
    let (frames, sent) = tokio::sync::mpsc::channel(1);
    let mut answers = executor.stream_decode(ReceiverStream::new(sent)).await?.into_inner();
    for _ in 0..4 {
        step(&frames, &mut answers, &mut branches).await?;
    }
    let (trunk, tokens) = branches.remove(0);
    let fork = ForkCacheRequest { kv_cache: trunk.kv_cache.clone(), count: Some(2), ..Default::default() };
    for (seed, handle) in executor.fork_cache(fork).await?.into_inner().kv_caches.into_iter().enumerate() {
        let sample = Sample { temperature: Some(0.8), seed: Some(seed as u64), ..Default::default() };
        let logits_policy = policy(Selection::Sample(sample));
        branches.push((DecodeInput { kv_cache: Some(handle), logits_policy, ..trunk.clone() }, tokens.clone()));
    }
    for _ in 0..8 {
        step(&frames, &mut answers, &mut branches).await?;
    }
    let mut kv_caches = Vec::from_iter(trunk.kv_cache);
    for (branch, token_ids) in branches {
        let whole = DetokenizeRequest { token_ids, ..Default::default() };
        println!("{}\n--", tokenizer.detokenize(whole).await?.into_inner().text);
        kv_caches.extend(branch.kv_cache);
    }
    let released = executor.release_cache(ReleaseCacheRequest { kv_caches }).await?.into_inner().results;
    println!("released {}", released.iter().filter(|result| result.released).count());
    Ok(())
}
