//! An echo server on tokio and 64 clients, each a task, in one process. One driver
//! reads the completions of each side; connections are established by a handshake
//! over TCP.
//!
//! `cargo run --example async_echo [DEVICE [CLIENTS [MESSAGES]]]`

use std::time::Instant;

use anyhow::{Result, ensure};
use ringverbs::future::{AsyncCompletionQueue, AsyncQueuePair};
use ringverbs::handshake::{self, Hello};
use ringverbs::{BufferPool, Device, PoolBuffer, ProtectionDomain, Transport};
use tokio::net::{TcpListener, TcpStream};

const SIZE: usize = 1024;
/// Number of receives of a connection, which limits the messages in flight to it.
const DEPTH: u32 = 4;

/// The resources that the connections of one side share.
#[derive(Clone)]
struct Side {
    domain: ProtectionDomain,
    cq: AsyncCompletionQueue,
    pool: BufferPool,
}

impl Side {
    fn new(device: &Device, connections: usize) -> Result<Self> {
        let domain = device.open()?.alloc_pd()?;
        let buffers = connections * (DEPTH as usize + 1);
        let queue = domain.context().completion_queue();
        let queue = queue.entries(2 * DEPTH * connections as u32);
        Ok(Self {
            // The driver is a task of this runtime.
            cq: AsyncCompletionQueue::spawn(queue)?,
            pool: BufferPool::new(&domain, &[(SIZE, buffers)])?,
            domain,
        })
    }

    /// Returns a connection with posted receives.
    async fn connect(&self, mut stream: TcpStream) -> Result<AsyncQueuePair> {
        let builder = self.domain.queue_pair(Transport::Reliable, &self.cq);
        let builder = builder.send_depth(DEPTH).recv_depth(DEPTH);
        let qp = AsyncQueuePair::new(builder.build()?, &self.cq).map_err(|(_, error)| error)?;
        let local = self.domain.context().local_address(1)?;
        qp.initialize(&local)?;
        for buffer in (0..DEPTH).filter_map(|_| self.pool.get(SIZE)) {
            qp.post_receive(buffer)?;
        }
        handshake::connect(&qp, &local, &mut stream, Hello::default()).await?;
        Ok(qp)
    }
}

/// Echoes each message until the client disconnects.
async fn serve(side: Side, stream: TcpStream, messages: usize) -> Result<()> {
    let qp = side.connect(stream).await?;
    for _ in 0..messages {
        let message = qp.message::<PoolBuffer>().await?.data;
        // The buffer is sent back, then posted as a receive again.
        let mut buffer = qp.send(message).await?;
        buffer.fill_up();
        qp.post_receive(buffer)?;
    }
    Ok(())
}

/// Sends messages and checks the echoes.
async fn ask(side: Side, address: String, number: usize, messages: usize) -> Result<()> {
    let qp = side.connect(TcpStream::connect(address).await?).await?;
    for round in 0..messages {
        let text = format!("message {round} of client {number}");
        let Some(mut buffer) = side.pool.get(0) else {
            anyhow::bail!("no buffer is left");
        };
        buffer.copy_from(text.as_bytes())?;
        // When dropped, the buffer returns to the pool.
        drop(qp.send(buffer).await?);
        let mut answer = qp.message::<PoolBuffer>().await?.data;
        ensure!(answer[..] == *text.as_bytes(), "another answer");
        answer.fill_up();
        qp.post_receive(answer)?;
    }
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let device = match arguments.first() {
        Some(name) => Device::named(name)?,
        None => Device::first_or_embedded()?,
    };
    let number = |at: usize, default| arguments.get(at).map_or(Ok(default), |it| it.parse());
    let (clients, messages) = (number(1, 64)?, number(2, 100)?);
    let (server, client) = (Side::new(&device, clients)?, Side::new(&device, clients)?);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?.to_string();
    let begin = Instant::now();
    let mut tasks = Vec::new();
    for number in 0..clients {
        tasks.push(tokio::spawn(ask(
            client.clone(),
            address.clone(),
            number,
            messages,
        )));
        let (stream, _) = listener.accept().await?;
        tasks.push(tokio::spawn(serve(server.clone(), stream, messages)));
    }
    for task in tasks {
        task.await??;
    }
    let (count, time) = (clients * messages, begin.elapsed());
    println!("{count} messages of {clients} clients were echoed in {time:.1?}");
    Ok(())
}
