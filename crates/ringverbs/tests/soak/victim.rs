//! Peers that vanish: processes that are killed while they are written to and
//! read from.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ringverbs::{AccessFlags, Context, Endpoint, RemoteAddr, Transport};

use super::Tally;
use super::life::connect;
use super::pool::SIZE;
use super::side::Side;
use testing::{is_pattern, pattern};

/// Begins what the victim has to say, among the test harness's lines.
const MARK: &str = "VICTIM ";
/// Names the seed of the victim's bytes, and makes it one.
const VARIABLE: &str = "SOAK_VICTIM";
const DEPTH: u32 = 16;

/// The victim: connects, and waits for its end.
#[test]
#[ignore = "a part of the other test"]
fn victim() {
    // The other test's, or nobody's: all ignored tests are run.
    let Ok(seed) = std::env::var(VARIABLE) else {
        return;
    };
    let context = testing::context("RXE_DEV");
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
    // Not for ever, if nobody kills it.
    thread::sleep(Duration::from_secs(120));
}

/// A process that does not outlive this value.
struct Victim(Child);

impl Victim {
    fn start(seed: u64) -> Self {
        let program = std::env::current_exe().unwrap();
        let mut command = Command::new(program);
        command
            .args(["victim::victim", "--ignored", "--exact", "--nocapture"])
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

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Kills one process after the other.
pub fn run(context: Context, seed: u64, end: Instant) -> Tally {
    let mut side = Side::new(context, seed);
    while Instant::now() < end {
        let number = side.numbers.next();
        let mut victim = Victim::start(number);
        let mut lines = BufReader::new(victim.0.stdout.take().unwrap()).lines();
        let mut said = || {
            let line = lines.find_map(|line| line.unwrap().strip_prefix(MARK).map(str::to_owned));
            line.expect("the victim went by itself")
        };
        let told = said();
        let words: Vec<&str> = told.split_whitespace().collect();
        let peer: Endpoint = words[0].parse().unwrap();
        let there = RemoteAddr::new(words[1].parse().unwrap(), words[2].parse().unwrap());
        let builder = side.domain.queue_pair(Transport::Reliable, &side.cq);
        let mut qp = builder.send_depth(DEPTH).build().unwrap();
        let mut stdin = victim.0.stdin.take().unwrap();
        writeln!(stdin, "{}", qp.endpoint(&side.local)).unwrap();
        said();
        connect(&mut qp, &side.local, &peer);

        let dies = Instant::now() + Duration::from_millis(side.numbers.below(500) as u64);
        let mut alive = true;
        let mut failed = false;
        let mut in_flight = VecDeque::new();
        while !(failed && in_flight.is_empty()) {
            if alive && Instant::now() >= dies {
                victim.kill();
                alive = false;
            }
            if !failed && in_flight.len() < DEPTH as usize {
                let (buffer, mut data) = side.pool.take();
                data.set_len(side.numbers.below(SIZE + 1)).unwrap();
                let reads = side.numbers.one_in(2);
                if reads {
                    data.fill(0);
                    qp.read(data, there, buffer.into()).unwrap();
                } else {
                    qp.write(data, there.offset(SIZE), buffer.into()).unwrap();
                }
                in_flight.push_back((buffer, reads));
            }
            let Some(mut completion) = side.cq.poll_one().unwrap() else {
                thread::sleep(Duration::from_micros(100));
                continue;
            };
            let (buffer, reads) = in_flight.pop_front().unwrap();
            assert_eq!(completion.token, u64::from(buffer));
            let data = completion.take_buffer().unwrap();
            match completion.result {
                Ok(_) => {
                    assert!(!reads || is_pattern(number, &data));
                    side.tally.operations += 1;
                }
                Err(failure) => {
                    assert!(
                        !alive,
                        "operation failed before the victim's kill: {failure}"
                    );
                    side.tally.failures += 1;
                    failed = true;
                }
            }
            side.pool.back(buffer, data);
        }
        qp.close().unwrap();
        side.tally.victims += 1;
    }
    side.close()
}
