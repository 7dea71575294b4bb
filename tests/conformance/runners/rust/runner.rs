//! Runs the steps of conformance cases with tonic and prost-reflect; the protocol is in tests/conformance/README.md.
//!
//! Its argument is the path of a descriptor set: there is no generated code.
use std::collections::HashMap;
use std::time::Duration;

use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor, MethodDescriptor};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::client::Grpc;
use tonic::codec::{Codec, CompressionEncoding, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::metadata::{AsciiMetadataKey, AsciiMetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

type Failure = Box<dyn std::error::Error>;

const DEADLINE: Duration = Duration::from_secs(20);
const LIMIT: usize = 64 << 20;

/// Writes messages of any kind, and reads those of the one it has.
struct Dynamic(MessageDescriptor);

impl Codec for Dynamic {
    type Encode = DynamicMessage;
    type Decode = DynamicMessage;
    type Encoder = Dynamic;
    type Decoder = Dynamic;

    fn encoder(&mut self) -> Dynamic {
        Dynamic(self.0.clone())
    }

    fn decoder(&mut self) -> Dynamic {
        Dynamic(self.0.clone())
    }
}

impl Encoder for Dynamic {
    type Item = DynamicMessage;
    type Error = Status;

    fn encode(&mut self, message: DynamicMessage, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        message.encode(into).map_err(|error| Status::internal(error.to_string()))
    }
}

impl Decoder for Dynamic {
    type Item = DynamicMessage;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<DynamicMessage>, Status> {
        let read = DynamicMessage::decode(self.0.clone(), from);
        read.map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}

fn to_line(kind: &str, message: &DynamicMessage) -> String {
    format!("{kind}\t{}", serde_json::to_string(message).expect("a message is JSON"))
}

/// Returns the line that tells how a call ended.
fn end(pool: &DescriptorPool, status: &Status) -> String {
    let kind = pool.get_message_by_name("google.rpc.Status").expect("the descriptor set has it");
    match DynamicMessage::decode(kind, status.details()) {
        Ok(told) if !status.details().is_empty() => to_line("end", &told),
        _ => format!("end\t{}", serde_json::json!({"code": status.code() as i32, "message": status.message()})),
    }
}

/// The call that is open: its frames go into `requests`, its answers come out of `lines`.
struct Stream {
    input: MessageDescriptor,
    requests: Option<mpsc::UnboundedSender<DynamicMessage>>,
    lines: mpsc::UnboundedReceiver<String>,
    call: AbortHandle,
}

struct Runner {
    pool: DescriptorPool,
    channels: HashMap<String, Channel>,
    stream: Option<Stream>,
}

impl Runner {
    fn method(&self, name: &str) -> Result<MethodDescriptor, Failure> {
        let (service, method) = name.split_once('/').ok_or("no method")?;
        let found = self.pool.get_service_by_name(service).ok_or("no such service")?;
        let method = found.methods().find(|each| each.name() == method);
        method.ok_or("no such method".into())
    }

    /// Returns what makes the call; `grpc-encoding` is no metadata: it says how the request is compressed.
    fn client(&mut self, target: &str, pairs: &[&str]) -> Result<Grpc<Channel>, Failure> {
        if !self.channels.contains_key(target) {
            let made = Endpoint::from_shared(format!("http://{target}"))?.connect_lazy();
            self.channels.insert(target.into(), made);
        }
        let client = Grpc::new(self.channels[target].clone());
        let client = client.max_decoding_message_size(LIMIT).max_encoding_message_size(LIMIT);
        let is_packed = pairs.first() == Some(&"grpc-encoding");
        Ok(if is_packed { client.send_compressed(CompressionEncoding::Gzip) } else { client })
    }

    async fn unary(&mut self, target: &str, name: &str, sent: &str, pairs: &[&str]) -> Result<String, Failure> {
        let method = self.method(name)?;
        let request = with_metadata(parse(method.input(), sent)?, pairs)?;
        let mut client = self.client(target, pairs)?;
        let path = format!("/{name}").parse()?;
        let reply = match client.ready().await {
            Ok(()) => client.unary(request, path, Dynamic(method.output())).await,
            Err(error) => Err(Status::from_error(error.into())),
        };
        Ok(match reply {
            Ok(reply) => to_line("message", reply.get_ref()),
            Err(status) => end(&self.pool, &status),
        })
    }

    fn open(&mut self, target: &str, name: &str, pairs: &[&str]) -> Result<String, Failure> {
        let method = self.method(name)?;
        let (requests, sent) = mpsc::unbounded_channel();
        let (answers, lines) = mpsc::unbounded_channel();
        let request = with_metadata(UnboundedReceiverStream::new(sent), pairs)?;
        let mut client = self.client(target, pairs)?;
        let (path, codec, pool) = (format!("/{name}").parse()?, Dynamic(method.output()), self.pool.clone());
        let call = tokio::spawn(async move {
            let told = async {
                client.ready().await.map_err(|error| Status::from_error(error.into()))?;
                let mut replies = client.streaming(request, path, codec).await?.into_inner();
                while let Some(reply) = replies.message().await? {
                    let _ = answers.send(to_line("message", &reply));
                }
                Ok::<(), Status>(())
            };
            let told = told.await;
            let _ = answers.send(told.map_or_else(|status| end(&pool, &status), |()| "end\t{}".into()));
        });
        let (input, call) = (method.input(), call.abort_handle());
        self.stream = Some(Stream { input, requests: Some(requests), lines, call });
        Ok("ok".into())
    }

    async fn on_stream(&mut self, command: &str, sent: &[&str]) -> Result<String, Failure> {
        let stream = self.stream.as_mut().ok_or("no stream is open")?;
        match (command, &stream.requests) {
            ("send", Some(requests)) => {
                let _ = requests.send(parse(stream.input.clone(), sent[0])?); // the call may have ended
            }
            ("close", _) => stream.requests = None,
            ("cancel", _) => stream.call.abort(), // to drop a call is how tonic cancels it
            ("receive", _) => {
                let cancelled = || end(&self.pool, &Status::new(Code::Cancelled, "cancelled by the runner"));
                return Ok(stream.lines.recv().await.unwrap_or_else(cancelled));
            }
            _ => return Err(format!("{command} is not possible").into()),
        }
        Ok("ok".into())
    }

    async fn answer(&mut self, line: &str) -> Result<String, Failure> {
        match line.split('\t').collect::<Vec<_>>()[..] {
            ["unary", target, name, request, ref pairs @ ..] => self.unary(target, name, request, pairs).await,
            ["open", target, name, ref pairs @ ..] => self.open(target, name, pairs),
            [command, ref fields @ ..] => self.on_stream(command, fields).await,
            [] => Err("an empty line".into()),
        }
    }
}

fn parse(kind: MessageDescriptor, text: &str) -> Result<DynamicMessage, Failure> {
    Ok(DynamicMessage::deserialize(kind, &mut serde_json::Deserializer::from_str(text))?)
}

fn with_metadata<T>(message: T, pairs: &[&str]) -> Result<Request<T>, Failure> {
    let mut request = Request::new(message);
    request.set_timeout(DEADLINE);
    for pair in pairs.chunks(2).filter(|pair| pair[0] != "grpc-encoding") {
        let value: AsciiMetadataValue = pair[1].parse()?;
        request.metadata_mut().append(pair[0].parse::<AsciiMetadataKey>()?, value);
    }
    Ok(request)
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let contract = std::fs::read(std::env::args().nth(1).ok_or("runner DESCRIPTOR_SET")?)?;
    let pool = DescriptorPool::decode(contract.as_slice())?;
    let mut runner = Runner { pool, channels: HashMap::new(), stream: None };
    for line in std::io::stdin().lines() {
        println!("{}", runner.answer(&line?).await?);
    }
    Ok(())
}
