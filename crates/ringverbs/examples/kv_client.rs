//! A client of `kv_server`. It sleeps until its answers come.
//!
//! `kv_client ADDRESS:PORT set KEY VALUE`, `get KEY`, or `check NAME COUNT`,
//! which sets and gets so many keys and compares; `RINGVERBS_DEVICE` names the
//! device.

use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use ringverbs::completion::{CompletionReader, EntryFlags, MessageFormat};
use ringverbs::{Buffer, Device, QueuePair, Transport, tcp};

const SIZE: usize = 1024;
const PATIENCE: Duration = Duration::from_secs(30);

struct Client {
    qp: QueuePair,
    reader: CompletionReader<MessageFormat>,
    /// Where requests are written; the operation has it while one is under way.
    request: Option<Buffer>,
    /// The server takes its end for ours.
    _stream: TcpStream,
}

impl Client {
    fn connect(address: &str) -> Result<Self> {
        let context = Device::first_or("embedded:")?.open()?;
        let domain = context.alloc_pd()?;
        let local = context.local_address(1)?;
        // The reader blocks on whatever the library thinks best.
        let reader = context.completion_queue().entries(8).reader().build()?;
        let builder = domain.queue_pair(Transport::Reliable, reader.queue());
        let mut qp = builder.build()?;

        // The first answer's receive is posted before there can be an answer.
        let mut request = domain.alloc(2 * SIZE)?.into_buffer();
        let answer = request.split_off(SIZE);
        qp.initialize(&local)?;
        qp.receive(answer, 0)?;
        let stream = TcpStream::connect(address)?;
        tcp::connect(&mut qp, &local, &stream, PATIENCE)?;
        Ok(Self {
            qp,
            reader,
            request: Some(request),
            _stream: stream,
        })
    }

    /// Sends a request, and waits for its answer.
    fn ask(&mut self, text: &str) -> Result<String> {
        let mut request = self
            .request
            .take()
            .context("an earlier request has failed")?;
        request.copy_from(text.as_bytes())?;
        self.qp.send(request, 0)?;
        let mut answer = None;
        // Two operations end: the send, and the receive of the answer.
        while answer.is_none() || self.request.is_none() {
            let mut entries: [_; 2] = Default::default();
            let read = self.reader.read_timeout(&mut entries, Some(PATIENCE));
            // An operation that failed is not among the entries: it is asked for.
            let count = match (read, self.reader.read_err()) {
                (_, Some(failed)) => return Err(failed.into()),
                (read, None) => read?,
            };
            for entry in entries.into_iter().take(count) {
                let Some(mut buffer) = entry.payload.into_buffer() else {
                    continue;
                };
                if entry.flags.contains(EntryFlags::RECV) {
                    answer = Some(String::from_utf8_lossy(&buffer).into_owned());
                    buffer.fill_up();
                    self.qp.receive(buffer, 0)?;
                } else {
                    self.request = Some(buffer);
                }
            }
        }
        Ok(answer.unwrap_or_default())
    }

    /// As `ask`, for an answer that is known.
    fn expect(&mut self, request: &str, expected: &str) -> Result<()> {
        match self.ask(request)? {
            answer if answer == expected => Ok(()),
            answer => bail!("{request}: {answer:?}, not {expected:?}"),
        }
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (address, words) = arguments
        .split_first()
        .context("kv_client ADDRESS:PORT ...")?;
    let mut client = Client::connect(address)?;
    match words {
        [check, name, count] if check == "check" => {
            let count: u32 = count.parse()?;
            for round in 0..2 {
                for key in 0..count {
                    let value = format!("{name}'s value {key} of round {round}");
                    client.expect(&format!("set {name}-{key} {value}"), "ok")?;
                    client.expect(&format!("get {name}-{key}"), &format!("= {value}"))?;
                }
            }
            client.expect(&format!("get {name}-{count}"), "none")?;
            println!("{name}: {count} keys are what they should be");
        }
        words => println!("{}", client.ask(&words.join(" "))?),
    }
    Ok(())
}
