//! Peers that vanish: processes that are killed while they are written to and
//! read from.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ringverbs::{AccessFlags, Context, Device, Endpoint, RemoteAddr, Transport};

use super::Counts;
use super::link_state::connect;
use super::pool::SIZE;
use super::resources::ThreadResources;
use testing::{is_pattern, pattern};

/// Prefix of the peer process's lines, among those of the test harness.
const MARK: &str = "PEER ";
/// The seed of the peer's bytes; set in the peer process.
const VARIABLE: &str = "SOAK_PEER";
const DEPTH: u32 = 16;

/// The peer process: connects, and waits until it is killed.
#[test]
#[ignore = "run by another test"]
fn peer_process() {
    let seed = std::env::var(VARIABLE).expect("run by another test");
    let device = Device::named(&testing::variable("RXE_DEV")).unwrap();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let cq = context.completion_queue().build().unwrap();
    let builder = domain.queue_pair(Transport::Reliable, &cq);
    let mut qp = builder.build().unwrap();
    let access = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
    let region = domain.alloc_remote(2 * SIZE, access).unwrap();
    let mut bytes = vec![0; SIZE];
    pattern(seed.parse().unwrap(), &mut bytes);
    region.write_at(0, &bytes).unwrap();
    let local = context.local_address(1).unwrap();
    let RemoteAddr { addr, rkey } = region.key();
    println!("\n{MARK}{} {addr} {rkey}", qp.endpoint(&local));
    let mut peer = String::new();
    std::io::stdin().read_line(&mut peer).unwrap();
    connect(&mut qp, &local, &peer.parse().unwrap());
    println!("{MARK}ready");
    // Exits in the end if nobody kills the process.
    thread::sleep(Duration::from_secs(120));
}

/// A process that does not outlive this value.
struct PeerProcess(Child);

impl PeerProcess {
    fn start(seed: u64) -> Self {
        let program = std::env::current_exe().unwrap();
        let mut command = Command::new(program);
        command
            .args([
                "killed_peer::peer_process",
                "--ignored",
                "--exact",
                "--nocapture",
            ])
            .env(VARIABLE, seed.to_string())
            .env("RXE_DEV", crate::device_name())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        Self(command.spawn().unwrap())
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts and kills processes, one after the other.
pub fn run(context: Context, seed: u64, end: Instant) -> Counts {
    let mut resources = ThreadResources::new(context, seed);
    while Instant::now() < end {
        let number = resources.numbers.next();
        let mut process = PeerProcess::start(number);
        let mut lines = BufReader::new(process.0.stdout.take().unwrap()).lines();
        let mut next_line = || {
            let line = lines.find_map(|line| line.unwrap().strip_prefix(MARK).map(str::to_owned));
            line.expect("the peer process exited early")
        };
        let greeting = next_line();
        let words: Vec<&str> = greeting.split_whitespace().collect();
        let peer: Endpoint = words[0].parse().unwrap();
        let there = RemoteAddr::new(words[1].parse().unwrap(), words[2].parse().unwrap());
        let builder = resources
            .domain
            .queue_pair(Transport::Reliable, &resources.cq);
        let mut qp = builder.send_depth(DEPTH).build().unwrap();
        let mut stdin = process.0.stdin.take().unwrap();
        writeln!(stdin, "{}", qp.endpoint(&resources.local)).unwrap();
        next_line();
        connect(&mut qp, &resources.local, &peer);

        let dies = Instant::now() + Duration::from_millis(resources.numbers.below(500) as u64);
        let mut alive = true;
        let mut failed = false;
        let mut in_flight = VecDeque::new();
        while !(failed && in_flight.is_empty()) {
            if alive && Instant::now() >= dies {
                process.kill();
                alive = false;
            }
            if !failed && in_flight.len() < DEPTH as usize {
                let (buffer, mut data) = resources.pool.take();
                data.set_len(resources.numbers.below(SIZE + 1)).unwrap();
                let reads = resources.numbers.one_in(2);
                if reads {
                    data.fill(0);
                    qp.read(data, there, buffer.into()).unwrap();
                } else {
                    qp.write(data, there.offset(SIZE), buffer.into()).unwrap();
                }
                in_flight.push_back((buffer, reads));
            }
            let Some(mut completion) = resources.cq.poll_one().unwrap() else {
                thread::sleep(Duration::from_micros(100));
                continue;
            };
            let (buffer, reads) = in_flight.pop_front().unwrap();
            assert_eq!(completion.token, u64::from(buffer));
            let data = completion.take_buffer().unwrap();
            match completion.result {
                Ok(_) => {
                    assert!(!reads || is_pattern(number, &data));
                    resources.counts.operations += 1;
                }
                Err(failure) => {
                    assert!(
                        !alive,
                        "operation failed before the peer was killed: {failure}"
                    );
                    resources.counts.failures += 1;
                    failed = true;
                }
            }
            resources.pool.put_back(buffer, data);
        }
        qp.close().unwrap();
        resources.counts.killed_peers += 1;
    }
    resources.close()
}
