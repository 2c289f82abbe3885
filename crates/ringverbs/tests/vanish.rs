//! What waits see when the link goes down under them, and when the device is
//! being taken away: each ends, or ends when its time is up. In a guest, as
//! root: `unplug --ignored --test-threads=1 --nocapture`. Each test makes a
//! dummy card and an rxe device of its own.
//!
//! rdma_rxe cannot take its objects back: `rdma link delete` waits until the
//! last one is closed, and what is open goes on working until then. The
//! connection manager tells its users at once.
#![allow(missing_docs, reason = "a test")]

use std::fmt::Debug;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use ringverbs::cm::Listener;
use ringverbs::completion::{ContextEntry, ContextFormat, ReadError, TokioReader, WaitObject};
use ringverbs::stream::{RdmaListener, RdmaStream};
use ringverbs::{AsyncEventType, Context, Device};

/// How long a wait is told to take.
const LIMIT: Duration = Duration::from_secs(4);
/// How long it is waited for.
const PATIENCE: Duration = Duration::from_secs(60);

fn sh(command: &str) {
    let status = Command::new("sh").args(["-c", command]).status().unwrap();
    assert!(status.success(), "{command}: {status}");
}

/// A dummy card with an rxe device on it.
struct Link {
    device: String,
    address: IpAddr,
}

impl Link {
    fn new(number: u8) -> Self {
        let device = format!("unplug{number}");
        sh(&format!(
            "modprobe rdma_ucm; ip link add rv{device} type dummy && \
             ip addr add 10.199.{number}.1/24 dev rv{device} && ip link set rv{device} up && \
             rdma link add {device} type rxe netdev rv{device}"
        ));
        let link = Self {
            device,
            address: Ipv4Addr::new(10, 199, number, 1).into(),
        };
        // Its address comes a moment after it.
        let end = Instant::now() + PATIENCE;
        while link.try_address().is_none() {
            assert!(Instant::now() < end, "{} has no address", link.device);
            thread::sleep(Duration::from_millis(50));
        }
        link
    }

    fn try_address(&self) -> Option<()> {
        let context = Device::named(&self.device).ok()?.open().ok()?;
        context.local_address(1).ok().map(drop)
    }

    fn open(&self) -> Context {
        Device::named(&self.device).unwrap().open().unwrap()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let command = format!("ip link del rv{}", self.device);
        let _ = Command::new("sh").args(["-c", &command]).status();
    }
}

/// Threads that wait, each with what it needs, and what they have to say.
struct Waits {
    said: Receiver<(&'static str, String, Duration)>,
    sender: Sender<(&'static str, String, Duration)>,
    running: Vec<&'static str>,
}

impl Waits {
    fn new() -> Self {
        let (sender, said) = channel();
        Self {
            said,
            sender,
            running: Vec::new(),
        }
    }

    fn start<T: Debug>(&mut self, name: &'static str, wait: impl FnOnce() -> T + Send + 'static) {
        self.running.push(name);
        let sender = self.sender.clone();
        thread::spawn(move || {
            let begin = Instant::now();
            let result = format!("{:?}", wait());
            let _ = sender.send((name, result, begin.elapsed()));
        });
    }

    /// What each has said; all must have, before patience is at an end. A
    /// thread that panics says nothing.
    fn ended(mut self) -> Vec<(&'static str, String, Duration)> {
        let end = Instant::now() + PATIENCE;
        let mut all = Vec::new();
        while !self.running.is_empty() {
            let left = end.saturating_duration_since(Instant::now());
            let Ok((name, result, took)) = self.said.recv_timeout(left) else {
                panic!("{:?} do not return; {all:?}", self.running);
            };
            println!("{name}: {result} after {took:?}");
            self.running.retain(|&running| running != name);
            all.push((name, result, took));
        }
        all
    }
}

/// All kinds of waits on the device; nothing will come.
fn begin(link: &Link) -> Waits {
    let mut waits = Waits::new();
    let objects = [("fd", WaitObject::Fd), ("condvar", WaitObject::Condvar)];
    for (name, object) in objects {
        let context = link.open();
        let builder = context.completion_queue().entries(16);
        let builder = builder.reader::<ContextFormat>().wait_object(object);
        let mut reader = builder.build().unwrap();
        waits.start(name, move || {
            let mut out: [ContextEntry; 4] = Default::default();
            match reader.read_timeout(&mut out, Some(LIMIT)) {
                Err(ReadError::Again) => "the time is up".to_owned(),
                other => format!("{other:?}"),
            }
        });
    }
    let context = link.open();
    waits.start("tokio", move || {
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.enable_all().build().unwrap();
        runtime.block_on(async {
            let builder = context.completion_queue().entries(16);
            let builder = builder.reader::<ContextFormat>();
            let reader = builder.wait_object(WaitObject::Fd).build().unwrap();
            let mut reader = TokioReader::new(reader).unwrap();
            let mut out: [ContextEntry; 4] = Default::default();
            let read = tokio::time::timeout(LIMIT, reader.read(&mut out)).await;
            match read {
                Err(_) => "the time is up".to_owned(),
                Ok(other) => format!("{other:?}"),
            }
        })
    });
    let context = link.open();
    waits.start("events", move || {
        let events = context.async_events();
        // A port that goes down may tell of its addresses first.
        let mut seen = Vec::new();
        let end = Instant::now() + LIMIT;
        while let Some(event) = events
            .wait(Some(end.saturating_duration_since(Instant::now())))
            .unwrap()
        {
            seen.push(event.event);
        }
        let port = seen.contains(&AsyncEventType::PORT_ERR);
        format!("{seen:?}, port error {port}")
    });

    let to = SocketAddr::from((link.address, 0));
    let listener = RdmaListener::bind(to).unwrap();
    let to = listener.local_addr().unwrap();
    let pair = || {
        let client = thread::spawn(move || RdmaStream::connect(to).unwrap());
        let (server, _) = listener.accept().unwrap();
        (client.join().unwrap(), server)
    };
    let (limited, other) = pair();
    limited.set_read_timeout(Some(LIMIT)).unwrap();
    waits.start("stream", move || {
        use std::io::Read;
        let result = (&limited).read(&mut [0; 8]).map_err(|error| error.kind());
        drop(other);
        result
    });
    let listener = Listener::bind(SocketAddr::from((link.address, 0))).unwrap();
    waits.start("listener", move || {
        listener
            .next_request(Some(LIMIT))
            .map(|request| request.is_some())
    });
    waits
}

/// What that one has said, and after how long.
fn of<'a>(all: &'a [(&str, String, Duration)], name: &str) -> (&'a str, Duration) {
    let one = all.iter().find(|(of, ..)| *of == name).unwrap();
    (&one.1, one.2)
}

#[test]
#[ignore = "needs rdma_rxe, and root"]
fn wait_ends_when_the_link_goes_down() {
    let link = Link::new(211);
    let waits = begin(&link);
    thread::sleep(Duration::from_millis(500));
    sh(&format!("ip link set rv{} down", link.device));
    let all = waits.ended();
    // Nothing has come, and nobody has waited for less than was asked.
    for name in ["fd", "condvar", "tokio"] {
        let (result, took) = of(&all, name);
        assert_eq!(result, r#""the time is up""#, "{name}");
        assert!(took >= LIMIT, "{name}");
    }
    assert!(of(&all, "events").0.contains("port error true"));
    assert_eq!(of(&all, "listener").0, "Ok(false)");
    let (stream, took) = of(&all, "stream");
    assert!(stream.contains("TimedOut") || stream.contains("WouldBlock"));
    assert!(took >= LIMIT);
}

#[test]
#[ignore = "needs rdma_rxe, and root"]
fn wait_ends_when_the_device_is_removed() {
    let link = Link::new(212);
    let mut waits = begin(&link);
    // One that nothing but the removal can end.
    let listener = RdmaListener::bind(SocketAddr::from((link.address, 0))).unwrap();
    let to = listener.local_addr().unwrap();
    let client = thread::spawn(move || RdmaStream::connect(to).unwrap());
    let (server, _) = listener.accept().unwrap();
    let client = client.join().unwrap();
    waits.start("stream for ever", move || {
        use std::io::Read;
        let result = (&client).read(&mut [0; 8]).map_err(|error| error.kind());
        drop(server);
        result
    });
    thread::sleep(Duration::from_millis(500));
    let delete = format!("rdma link delete {}", link.device);
    let mut delete: Child = Command::new("sh").args(["-c", &delete]).spawn().unwrap();
    let all = waits.ended();
    for name in ["fd", "condvar", "tokio"] {
        // A kernel that takes the objects back says so, and that is right too.
        let (result, took) = of(&all, name);
        let up = result == r#""the time is up""# && took >= LIMIT;
        assert!(up || result.contains("Err("), "{name}: {result}");
    }
    for name in ["stream", "stream for ever"] {
        let (result, _) = of(&all, name);
        assert!(result.starts_with("Err("), "{name}: {result}");
    }
    drop(listener);
    // Nothing of ours is open any more.
    let end = Instant::now() + PATIENCE;
    while delete.try_wait().unwrap().is_none() {
        assert!(Instant::now() < end, "the device is held");
        thread::sleep(Duration::from_millis(50));
    }
    assert!(Device::named(&link.device).is_err());
}
