//! A key-value server on tokio, with a task for each client. It sleeps while it is
//! idle.
//!
//! Clients connect by TCP; requests (`set KEY VALUE`, `get KEY`) and answers are
//! RDMA messages. Closing the TCP connection ends a client.
//!
//! `cargo run -p ringverbs --example kv_server ADDRESS:PORT [DEVICE]`, then `kv_client`.
//! Without an RDMA device both use the embedded one.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use ringverbs::completion::{EntryFlags, MessageFormat, ReadError, TokioReader, WaitObject};
use ringverbs::{Device, ProtectionDomain, Transport, tcp};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::spawn_blocking;

type Store = Arc<Mutex<HashMap<String, String>>>;

/// The maximum message length, and the maximum number of pending requests of a client.
const SIZE: usize = 1024;
const DEPTH: usize = 4;
const PATIENCE: Duration = Duration::from_secs(10);

/// Executes a request. No reply is longer than the longest request.
fn answer(store: &Store, request: &[u8]) -> String {
    let request = std::str::from_utf8(request).unwrap_or_default();
    let mut store = store.lock().unwrap_or_else(PoisonError::into_inner);
    match *request.splitn(3, ' ').collect::<Vec<_>>() {
        ["set", key, value] => {
            store.insert(key.to_owned(), value.to_owned());
            "ok".to_owned()
        }
        ["get", key] => store
            .get(key)
            .map_or("none".to_owned(), |it| format!("= {it}")),
        _ => "what?".to_owned(),
    }
}

/// Serves one client until it disconnects.
async fn serve(stream: TcpStream, domain: ProtectionDomain, store: Store) -> Result<()> {
    // A completion queue whose descriptor tokio watches: with nothing to read,
    // the task sleeps, and others run.
    let context = domain.context();
    let queue = context.completion_queue().entries(2 * DEPTH as u32);
    let reader = queue.reader::<MessageFormat>().wait_object(WaitObject::Fd);
    let mut reader = TokioReader::new(reader.build()?)?;
    let builder = domain.queue_pair(Transport::Reliable, reader.reader().queue());
    let mut qp = builder.build()?;

    // Receives are posted before the client can send.
    let local = context.local_address(1)?;
    qp.initialize(&local)?;
    for buffer in domain.alloc(DEPTH * SIZE)?.into_buffers(SIZE).take(DEPTH) {
        qp.receive(buffer, 0)?;
    }
    // Connecting blocks, so a blocking thread does it.
    let stream = stream.into_std()?;
    let connect = move || (tcp::connect(&mut qp, &local, &stream, PATIENCE), qp, stream);
    let (connected, mut qp, stream) = spawn_blocking(connect).await?;
    connected?;
    let stream = TcpStream::from_std(stream)?;

    let mut entries: [_; DEPTH] = Default::default();
    loop {
        let count = tokio::select! {
            // The client has closed the connection. Operations in flight own their
            // memory until the queue pair and the queue are dropped.
            _ = stream.readable() => return Ok(()),
            // Cancelling a read loses no entry.
            read = reader.read(&mut entries) => match read {
                Err(ReadError::ErrorAvailable) => match reader.read_err() {
                    Some(failed) => return Err(failed.into()),
                    None => continue,
                }
                read => read?,
            }
        };
        for entry in &mut entries[..count] {
            let Some(mut buffer) = std::mem::take(&mut entry.payload).into_buffer() else {
                continue;
            };
            // The reply is sent from the request's buffer, which is then posted as
            // a receive again.
            if entry.flags.contains(EntryFlags::RECV) {
                buffer.copy_from(answer(&store, &buffer).as_bytes())?;
                qp.send(buffer, 0)?;
            } else {
                buffer.fill_up();
                qp.receive(buffer, 0)?;
            }
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().unwrap_or("0.0.0.0:7475".to_owned());
    let name = arguments.next();
    let device = name.map_or_else(
        || Device::first_or("embedded:"),
        |name| Device::named(&name),
    )?;
    eprintln!("device {}", device.name());
    let domain = device.open()?.alloc_pd()?;
    let store = Store::default();
    let listener = TcpListener::bind(&address).await?;
    println!("listening on {}", listener.local_addr()?);
    loop {
        let (stream, peer) = listener.accept().await?;
        let client = serve(stream, domain.clone(), Store::clone(&store));
        tokio::spawn(async move { println!("{peer} is gone: {:?}", client.await) });
    }
}
