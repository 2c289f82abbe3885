//! An embedded device between operations: what it costs, and how soon a post wakes it.

use std::fs;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use ringverbs::cm::{Listener, manager::PortSpace};
use ringverbs::{
    CompletionChannel, CompletionQueue, Device, ProtectionDomain, QueuePair, Transport,
};

/// A connection of a context with itself.
struct Loopback {
    domain: ProtectionDomain,
    cq: CompletionQueue,
    channel: CompletionChannel,
    qp: QueuePair,
}

impl Loopback {
    fn new(device: &Device) -> Self {
        let context = device.open().unwrap();
        let channel = context.completion_channel().unwrap();
        let cq = context.completion_queue().channel(&channel).build();
        let cq = cq.unwrap();
        let domain = context.alloc_pd().unwrap();
        let mut qp = domain.queue_pair(Transport::Reliable, &cq).build().unwrap();
        let local = context.local_address(1).unwrap();
        let own = qp.endpoint(&local);
        qp.connect(&local, &own).unwrap();
        Self {
            domain,
            cq,
            channel,
            qp,
        }
    }

    /// Sends a message to itself; waits for its completions as an event loop does.
    fn exchange(&mut self) {
        let buffer = || self.domain.alloc(64).unwrap().into_buffer();
        self.qp.receive(buffer(), 1).unwrap();
        assert!(!self.cq.arm(false).unwrap());
        self.qp.send(buffer(), 2).unwrap();
        let mut completions = 0;
        while completions < 2 {
            while let Some(completion) = self.cq.poll_one().unwrap() {
                completion.result.unwrap();
                completions += 1;
            }
        }
    }

    /// From a post to the event of its completion.
    fn post_to_event(&mut self) -> Duration {
        let buffer = || self.domain.alloc(64).unwrap().into_buffer();
        self.qp.receive(buffer(), 1).unwrap();
        assert!(!self.cq.arm(false).unwrap());
        thread::sleep(Duration::from_millis(300));
        let buffer = buffer();
        let began = Instant::now();
        self.qp.send(buffer, 2).unwrap();
        let mut fd = [PollFd::new(self.channel.as_fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut fd, PollTimeout::from(5000_u16)).unwrap(), 1);
        let took = began.elapsed();
        self.channel.wait(Some(Duration::ZERO)).unwrap();
        let mut completions = 0;
        while completions < 2 {
            completions += usize::from(self.cq.poll_one().unwrap().is_some());
        }
        took
    }
}

/// The processor time of all threads of this process.
fn processor_time() -> Duration {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let of_task = |task: std::io::Result<fs::DirEntry>| {
        let text = fs::read_to_string(task.unwrap().path().join("schedstat")).unwrap();
        let nanos = text.split_whitespace().next().unwrap();
        nanos.parse::<u64>().unwrap()
    };
    Duration::from_nanos(tasks.map(of_task).sum())
}

/// How often a thread has begun to wait.
fn waits(thread: &Path) -> u64 {
    let text = fs::read_to_string(thread.join("status")).unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.unwrap().trim().parse().unwrap()
}

/// How often threads of this process have begun to wait.
fn wake_ups() -> u64 {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    tasks.map(|task| waits(&task.unwrap().path())).sum()
}

/// Limit of wake-ups in three and a half seconds.
const WAKE_UPS: u64 = 200;

/// The processor time is the process's: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// A few wake-ups a second with a connected queue pair and a listener: below a thousandth of a
/// processor, which a virtual machine may count as several times that.
#[test]
fn an_idle_device_costs_next_to_nothing() {
    let _alone = ALONE.lock().unwrap();
    let directory = std::env::temp_dir().join(format!("ringverbs-idle-{}", std::process::id()));
    fs::create_dir(&directory).unwrap();
    for device in [
        "embedded".to_owned(),
        format!("embedded:{}", directory.display()),
    ] {
        let device = Device::named(&device).unwrap();
        let mut loopback = Loopback::new(&device);
        loopback.exchange();
        let address = (Ipv4Addr::LOCALHOST, 0).into();
        let _listener = Listener::bind_on(&device, PortSpace::TCP, address, 4).unwrap();
        let woken = wake_ups();
        // Also because what this thread has just run is accounted when it sleeps.
        thread::sleep(Duration::from_millis(500));
        let (before, began) = (processor_time(), Instant::now());
        thread::sleep(Duration::from_secs(3));
        let share = (processor_time() - before).as_secs_f64() / began.elapsed().as_secs_f64();
        let woken = wake_ups() - woken;
        println!(
            "{device:?}: {woken} wake-ups, {:.3}% of a processor",
            share * 100.0
        );
        assert!(woken < WAKE_UPS && share < 0.01, "{woken}, {share}");
    }
    fs::remove_dir_all(directory).unwrap();
}

/// A thread that waits for an event, and polls nothing, need not wait until the
/// device's thread wakes by itself.
#[test]
fn a_post_wakes_the_device() {
    let _alone = ALONE.lock().unwrap();
    let mut loopback = Loopback::new(&Device::embedded().unwrap());
    let mut times: Vec<_> = (0..9).map(|_| loopback.post_to_event()).collect();
    times.sort();
    println!("{times:?}");
    assert!(times[4] < Duration::from_millis(5), "{times:?}");
}

/// Processes that keep all processors busy.
struct OtherPrograms(Vec<Child>);

impl OtherPrograms {
    fn start() -> Self {
        let count = 2 * thread::available_parallelism().unwrap().get();
        let start = |_| {
            let mut shell = Command::new("sh");
            shell.args(["-c", "while :; do :; done"]).spawn().unwrap()
        };
        Self((0..count).map(start).collect())
    }
}

impl Drop for OtherPrograms {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Empty polls beside other programs sleep, also those of queues in turn, of one device or of
/// several.
#[test]
fn empty_polls_of_several_queues_sleep() {
    let _alone = ALONE.lock().unwrap();
    let _others = OtherPrograms::start();
    let directory = std::env::temp_dir().join(format!("ringverbs-polls-{}", std::process::id()));
    fs::create_dir(&directory).unwrap();
    // Each has its network.
    let names = [
        "embedded".to_owned(),
        format!("embedded:{}", directory.display()),
    ];
    let devices = names.map(|name| Device::named(&name).unwrap());
    let mut loopbacks: Vec<_> = devices.iter().map(Loopback::new).collect();
    // Other numbers of turns in one than in the other.
    loopbacks[0].exchange();
    let queue = |device: &Device| device.open().unwrap().completion_queue().build().unwrap();
    let all = (0..2).flat_map(|_| devices.iter().map(queue));
    let mut queues: Vec<_> = all.collect();
    for polled in 1..=queues.len() {
        let before = waits(Path::new("/proc/thread-self"));
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(500) {
            for cq in &mut queues[..polled] {
                assert!(cq.poll_one().unwrap().is_none());
            }
        }
        let waits = waits(Path::new("/proc/thread-self")) - before;
        println!("{polled} queues: {waits} sleeps");
        // The longest takes 5 ms; spinning, it is 0.
        assert!(waits >= 5, "{polled} queues: {waits}");
    }
    fs::remove_dir_all(directory).unwrap();
}
