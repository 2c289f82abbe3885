//! The embedded device on a busy machine: the round-trip time of requests while twice as
//! many compute-bound processes run as there are processors, and without them.
//!
//! `cargo bench -p ringverbs --bench busy [ROUNDS]`. Idle and busy rounds alternate; prints
//! the medians.
#![allow(missing_docs, reason = "a program")]

use std::env;
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use ringverbs::{Buffer, Completion, CompletionQueue, Device, Operation, Transport, tcp};

const LENGTH: usize = 64;
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// A server that polls, and clients with a thread each.
struct Case {
    name: &'static str,
    /// Whether the clients are in another process.
    apart: bool,
    clients: usize,
    /// Number of requests of each client.
    requests: usize,
}

const CASES: [Case; 3] = [
    Case {
        name: "one process",
        apart: false,
        clients: 1,
        requests: 1000,
    },
    Case {
        name: "two processes",
        apart: true,
        clients: 1,
        requests: 1000,
    },
    Case {
        name: "64 clients",
        apart: true,
        clients: 64,
        requests: 20,
    },
];

/// Compute-bound processes, which end with this process or on drop.
struct Load(Vec<Child>);

impl Load {
    fn new() -> Result<Self> {
        let count = 2 * thread::available_parallelism()?.get();
        let mut load = Self(Vec::new());
        for _ in 0..count {
            load.0.push(spawn_self(&["compute"])?);
        }
        Ok(load)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Starts this program again.
fn spawn_self(arguments: &[&str]) -> Result<Child> {
    let mut command = Command::new(env::current_exe()?);
    command.args(arguments).stdin(Stdio::piped());
    command.spawn().context("this program again")
}

fn poll(cq: &mut CompletionQueue) -> Result<Completion> {
    let end = Instant::now() + TIME_LIMIT;
    while Instant::now() < end {
        if let Some(completion) = cq.poll_for(Duration::from_millis(10))? {
            completion.result?;
            return Ok(completion);
        }
    }
    bail!("nothing for {TIME_LIMIT:?}")
}

/// Answers the requests of all clients. Returns the time from the first one to the
/// completion of the last answer.
fn serve(device: &Device, listener: &TcpListener, case: &Case) -> Result<Duration> {
    let context = device.open()?;
    let domain = context.alloc_pd()?;
    let entries = 4 * case.clients as u32;
    let mut cq = context.completion_queue().entries(entries).build()?;
    let local = context.local_address(1)?;
    let mut clients = Vec::new();
    for client in 0..case.clients {
        let mut qp = domain.queue_pair(Transport::Reliable, &cq).build()?;
        qp.initialize(&local)?;
        let mut buffers = domain.alloc(2 * LENGTH)?.into_buffers(LENGTH);
        qp.receive(buffers.next().context("a buffer")?, client as u64)?;
        let (stream, _) = listener.accept()?;
        tcp::connect(&mut qp, &local, &stream, TIME_LIMIT)?;
        clients.push((qp, buffers.next(), stream));
    }
    for (_, _, stream) in &clients {
        tcp::barrier(stream, TIME_LIMIT)?;
    }
    let mut began = None;
    let mut answers = 0;
    while answers < case.clients * case.requests {
        let mut completion = poll(&mut cq)?;
        began.get_or_insert_with(Instant::now);
        let client = completion.token as usize;
        let (qp, answer, _) = &mut clients[client];
        let buffer = completion.take_buffer().context("a buffer")?;
        if completion.operation == Operation::Receive {
            qp.receive(buffer, client as u64)?;
            qp.send(answer.take().context("an answer")?, client as u64)?;
        } else {
            *answer = Some(buffer);
            answers += 1;
        }
    }
    let took = began.context("no request")?.elapsed();
    for (_, _, stream) in &clients {
        tcp::barrier(stream, TIME_LIMIT)?;
    }
    Ok(took)
}

/// Sends requests one after another, each after the reply to the last one.
fn run_client(device: &Device, address: &str, requests: usize) -> Result<()> {
    let context = device.open()?;
    let domain = context.alloc_pd()?;
    let mut cq = context.completion_queue().entries(4).build()?;
    let local = context.local_address(1)?;
    let mut qp = domain.queue_pair(Transport::Reliable, &cq).build()?;
    qp.initialize(&local)?;
    let mut buffers = domain.alloc(2 * LENGTH)?.into_buffers(LENGTH);
    let mut request: Buffer = buffers.next().context("a buffer")?;
    let mut answer = buffers.next().context("a buffer")?;
    let stream = TcpStream::connect(address)?;
    tcp::connect(&mut qp, &local, &stream, TIME_LIMIT)?;
    tcp::barrier(&stream, TIME_LIMIT)?;
    for _ in 0..requests {
        qp.receive(answer, 0)?;
        qp.send(request, 0)?;
        let (mut sent, mut answered) = (None, None);
        while sent.is_none() || answered.is_none() {
            let mut completion = poll(&mut cq)?;
            match completion.operation {
                Operation::Receive => answered = completion.take_buffer(),
                _ => sent = completion.take_buffer(),
            }
        }
        request = sent.context("a buffer")?;
        answer = answered.context("a buffer")?;
    }
    Ok(tcp::barrier(&stream, TIME_LIMIT)?)
}

/// All clients, a thread each.
fn clients(device: &Device, address: &str, count: usize, requests: usize) -> Result<()> {
    thread::scope(|scope| {
        let spawn_client = || scope.spawn(|| run_client(device, address, requests));
        let clients: Vec<_> = (0..count).map(|_| spawn_client()).collect();
        clients
            .into_iter()
            .try_for_each(|it| it.join().expect("a client panicked"))
    })
}

fn run(case: &Case) -> Result<Duration> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?.to_string();
    if !case.apart {
        let device = Device::embedded()?;
        return thread::scope(|scope| {
            let clients = scope.spawn(|| clients(&device, &address, case.clients, case.requests));
            let took = serve(&device, &listener, case)?;
            clients.join().expect("a client panicked")?;
            Ok(took)
        });
    }
    let name = format!(
        "ringverbs-busy-{}-{}",
        std::process::id(),
        listener.local_addr()?.port()
    );
    let folder = env::temp_dir().join(name);
    let path = folder.to_string_lossy();
    let (count, requests) = (case.clients.to_string(), case.requests.to_string());
    let mut child = spawn_self(&["clients", &address, &path, &count, &requests])?;
    let took = serve(&Device::embedded_at(&folder)?, &listener, case)?;
    let status = child.wait()?;
    std::fs::remove_dir_all(&folder)?;
    ensure!(status.success(), "the clients: {status}");
    Ok(took)
}

fn median(times: &mut [Duration], exchanges: usize) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1e6 / exchanges as f64
}

fn main() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).filter(|it| it != "--bench").collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let rounds = match arguments[..] {
        ["compute"] => {
            thread::spawn(|| {
                // At the end of the parent.
                let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
                std::process::exit(0)
            });
            loop {
                std::hint::black_box(0);
            }
        }
        ["clients", address, folder, count, requests] => {
            let device = Device::embedded_at(folder)?;
            return clients(&device, address, count.parse()?, requests.parse()?);
        }
        [rounds] => rounds.parse()?,
        _ => 5,
    };
    println!("us for a request and its reply, medians of {rounds} rounds");
    println!("{:15} {:>8} {:>8} {:>6}", "", "idle", "busy", "ratio");
    for case in &CASES {
        let (mut idle, mut busy) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            idle.push(run(case)?);
            let _load = Load::new()?;
            thread::sleep(Duration::from_millis(200));
            busy.push(run(case)?);
        }
        let exchanges = case.clients * case.requests;
        let (idle, busy) = (median(&mut idle, exchanges), median(&mut busy, exchanges));
        println!(
            "{:15} {idle:>8.1} {busy:>8.1} {:>6.1}",
            case.name,
            busy / idle
        );
    }
    Ok(())
}
