//! A client of `kv_server`, which sleeps until replies arrive.
//!
//! `kv_client ADDRESS:PORT set KEY VALUE`, `get KEY`, or `check NAME COUNT`,
//! which sets, gets and compares COUNT keys; `RINGVERBS_DEVICE` names the device.

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
    /// The buffer of requests; the operation owns it while one is in flight.
    request: Option<Buffer>,
    /// Closing it ends the session at the server.
    _stream: TcpStream,
}

impl Client {
    fn connect(address: &str) -> Result<Self> {
        let context = Device::first_or("embedded:")?.open()?;
        let domain = context.alloc_pd()?;
        let local = context.local_address(1)?;
        // The library chooses the wait object of the reader.
        let reader = context.completion_queue().entries(8).reader().build()?;
        let builder = domain.queue_pair(Transport::Reliable, reader.queue());
        let mut qp = builder.build()?;

        // The receive for the first reply is posted before the first request.
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

    /// Sends a request and waits for its reply.
    fn ask(&mut self, text: &str) -> Result<String> {
        let mut request = self
            .request
            .take()
            .context("an earlier request has failed")?;
        request.copy_from(text.as_bytes())?;
        self.qp.send(request, 0)?;
        let mut answer = None;
        // Two operations complete: the send, and the receive of the reply.
        while answer.is_none() || self.request.is_none() {
            let mut entries: [_; 2] = Default::default();
            let read = self.reader.read_timeout(&mut entries, Some(PATIENCE));
            // A failed operation is not among the entries; `read_err` returns it.
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

    /// As `ask`, and checks the reply.
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
