//! Captures: every frame with its direction, queue pair and why it was dropped, without payload
//! unless that is asked for; read by a decoder here and, where it is installed, by tshark.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use device_testing::embedded::driver::*;
use ringverbs_embedded::{CaptureOptions, CaptureRing, CaptureSnap, Drive, Network};
use testing::pcapng::{Frame, frames};
use uverbs::{Data, Opcode, QpAttr, QpAttrMask, QpState, QpType, RemoteMemory, SendFlags, SendWr};

/// The bytes that messages consist of.
const PAYLOAD: u8 = 0xa5;
const REMOTE_ACCESS_ERROR: u32 = 10;

/// A directory for captures.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("ringverbs-capture-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn options(&self) -> CaptureOptions {
        CaptureOptions::new(self.0.join("frames.pcapng"))
    }

    /// Returns the path of this process's file.
    fn file(&self, suffix: &str) -> PathBuf {
        let name = format!("frames-{}{suffix}.pcapng", std::process::id());
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Two connected queue pairs.
struct Pair {
    hosts: [Host; 2],
    cqs: [Cq; 2],
    qps: [Qp; 2],
    memory: [Memory; 2],
}

impl Pair {
    /// Connects queue pairs of two devices, or of one.
    fn new(network: &Network, profiles: [&str; 2], kind: QpType) -> Self {
        let first = network.strict_device(profiles[0]).unwrap();
        let second = match profiles[1] {
            "same" => None,
            profile => Some(network.strict_device(profile).unwrap()),
        };
        let hosts = [
            Host::new(&first),
            Host::new(second.as_ref().unwrap_or(&first)),
        ];
        let mut cqs = [0, 1].map(|at: usize| hosts[at].cq(64));
        let mut number = 0;
        let qps = cqs.each_mut().map(|cq| {
            number += 1;
            hosts[number - 1].qp(kind, cq)
        });
        connect_pair(kind, (&qps[0], &hosts[0]), (&qps[1], &hosts[1]));
        let memory = [0, 1].map(|at: usize| hosts[at].memory(8192));
        memory[0].set(0, &[PAYLOAD; 8192]);
        Self {
            hosts,
            cqs,
            qps,
            memory,
        }
    }

    fn number(&self, end: usize) -> String {
        format!(" queue pair {:#x}", self.qps[end].object.qp_num())
    }

    fn send(&mut self, length: usize) {
        receive(&mut self.qps[1], 1, self.memory[1].sge(0, 8192));
        let from = self.memory[0].sge(0, length);
        post(&mut self.qps[0], 2, Operation::Send, from);
        assert_eq!(poll(&self.hosts[0], &mut self.cqs[0]).status, 0);
        assert_eq!(poll(&self.hosts[1], &mut self.cqs[1]).status, 0);
    }

    /// Writes with a key that does not exist.
    fn write_wrongly(&mut self) {
        let list = [self.memory[0].sge(0, 64)];
        let wr = SendWr {
            remote: RemoteMemory {
                addr: self.memory[1].address(),
                rkey: self.memory[1].keys.rkey ^ 0xff_0000,
            },
            data: Data::Sges(&list),
            ..SendWr::new(3, Opcode::RDMA_WRITE, SendFlags::SIGNALED)
        };
        let sends = &mut self.qps[0].send;
        sends.begin();
        // SAFETY: the memory is kept until the completion is read.
        unsafe {
            sends.push(&wr).unwrap();
            assert!(sends.publish());
        }
        let failed = poll(&self.hosts[0], &mut self.cqs[0]);
        assert_eq!(failed.status, REMOTE_ACCESS_ERROR);
    }
}

/// Captures a message of two packets and a refused write.
fn exchange(folder: &Folder, profiles: [&str; 2], snap: CaptureSnap) -> (Vec<Frame>, [String; 2]) {
    let network = Network::new(Drive::Caller).unwrap();
    let options = folder.options().with_snap(snap);
    network.capture(&options, None).unwrap();
    let mut pair = Pair::new(&network, profiles, QpType::RC);
    pair.send(5000);
    pair.write_wrongly();
    assert_eq!(network.end_capture(), Some(folder.file("")));
    // Not captured.
    assert_eq!(network.end_capture(), None);
    (frames(&folder.file("")), [pair.number(0), pair.number(1)])
}

fn has_payload(frame: &Frame) -> bool {
    frame.bytes.windows(8).any(|it| it == [PAYLOAD; 8])
}

#[test]
fn frames_have_direction_queue_pair_and_cause() {
    let folder = Folder::new("frames");
    for profiles in [["roce", "roce"], ["ib", "ib"], ["roce", "same"]] {
        let (found, numbers) = exchange(&folder, profiles, CaptureSnap::Headers);
        let ends: Vec<&str> = match profiles[1] {
            "same" => vec!["mlx5_0", "mlx5_0"],
            _ => vec!["mlx5_0", "mlx5_1"],
        };
        // Two packets and a write there, an acknowledgement and a NAK back.
        for (end, count) in [(0, 3), (1, 2)] {
            for (at, is_outbound) in [(end, true), (1 - end, false)] {
                let same = found.iter().filter(|it| {
                    let suffix = format!("{}{}", ends[at], numbers[at]);
                    let is_of = it.comment.split(';').next().unwrap().ends_with(&suffix);
                    is_of && it.is_outbound == is_outbound && it.interface == ends[at]
                });
                assert_eq!(same.count(), count, "{profiles:?} {found:#?}");
            }
        }
        assert_eq!(found.len(), 10);
        let process = format!("process {} (", std::process::id());
        assert!(found.iter().all(|it| it.comment.starts_with(&process)));
        assert!(found.is_sorted_by_key(|it| it.time));
        assert!(!found.iter().any(has_payload));
        // Neither the ICRC, from which a short payload could be computed.
        let of_message = |it: &&Frame| it.length > 800 && it.is_outbound;
        assert_eq!(found.iter().filter(of_message).count(), 2);
        for frame in found.iter().filter(of_message) {
            let end = frame.bytes.len() - if profiles[0] == "ib" { 2 } else { 0 };
            assert_eq!(frame.bytes[end - 4..end], [0; 4]);
        }
        let refused: Vec<&Frame> = (found.iter())
            .filter(|it| {
                it.comment
                    .contains("; request of the peer refused: RDMA write of 64")
            })
            .collect();
        assert_eq!(refused.len(), 1, "{found:#?}");
        assert!(refused[0].comment.contains("no key has this number"));
        assert!(!refused[0].is_outbound);
        let failed = "; work request failed: the peer refused it: remote access error";
        let failed = found.iter().filter(|it| it.comment.contains(failed));
        assert_eq!(failed.count(), 1, "{found:#?}");
        check_by_tshark(&folder.file(""), &found);
    }
}

/// Compares with what tshark reads.
fn check_by_tshark(path: &Path, expected: &[Frame]) {
    let fields = [
        "frame.time_epoch",
        "frame.len",
        "frame.interface_name",
        "frame.packet_flags_direction",
        "infiniband.bth.destqp",
        "frame.comment",
        "_ws.malformed",
    ];
    let mut command = Command::new("tshark");
    command.arg("-n").arg("-r").arg(path);
    command.args(["-T", "fields", "-E", "separator=|"]);
    fields.iter().for_each(|field| {
        command.args(["-e", field]);
    });
    let Ok(output) = command.output() else {
        return testing::skip!(missing: "tshark", "tshark is not installed");
    };
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), expected.len(), "{text}");
    for (line, frame) in text.lines().zip(expected) {
        let found: Vec<&str> = line.split('|').collect();
        let (seconds, nanos) = (frame.time / 1_000_000_000, frame.time % 1_000_000_000);
        assert_eq!(found[0], format!("{seconds}.{nanos:09}"));
        assert_eq!(found[2], frame.interface);
        assert!(
            found[3].ends_with(if frame.is_outbound { '2' } else { '1' }),
            "{line}"
        );
        assert!(found[4].starts_with("0x"), "no BTH: {line}");
        assert_eq!((found[5], found[6]), (&*frame.comment, ""));
    }
}

#[test]
fn payload_is_captured_on_demand() {
    let folder = Folder::new("snap");
    let (all, _) = exchange(&folder, ["roce", "roce"], CaptureSnap::All);
    let whole = |it: &Frame| it.bytes.len() == it.length as usize;
    assert!(all.iter().all(whole));
    // Two packets of the message and the write, at both ends.
    assert_eq!(all.iter().filter(|it| has_payload(it)).count(), 6);
    let (some, _) = exchange(&folder, ["ib", "ib"], CaptureSnap::Bytes(30));
    // Of InfiniBand, a header of the capture precedes the frame.
    assert!(some.iter().all(|it| it.bytes.len() == 16 + 30 || whole(it)));
}

#[test]
fn dropped_datagrams_say_why() {
    let folder = Folder::new("dropped");
    let network = Network::simulated(1).unwrap();
    let mut pair = Pair::new(&network, ["roce", "roce"], QpType::RC);
    network.capture(&folder.options(), None).unwrap();
    // The responder drops packets until the retries end.
    let Pair {
        cqs,
        qps: [requester, responder],
        memory,
        ..
    } = &mut pair;
    let number = responder.object.qp_num();
    let attr = QpAttr {
        qp_state: QpState::RESET,
        ..QpAttr::default()
    };
    modify(responder, &attr, QpAttrMask::STATE);
    post(requester, 1, Operation::Send, memory[0].sge(0, 64));
    let failed = loop {
        network.step();
        if let Some(completion) = poll_once(&mut cqs[0]) {
            break completion;
        }
    };
    assert_ne!(failed.status, 0);
    network.end_capture().unwrap();
    let found = frames(&folder.file(""));
    let reason = format!("queue pair {number:#x}; packet dropped: the queue pair is in RESET");
    let (sent, received): (Vec<_>, Vec<_>) = found.iter().partition(|it| it.is_outbound);
    assert!(sent.len() > 1 && sent.len() == received.len(), "{found:#?}");
    assert!(
        received.iter().all(|it| it.comment.ends_with(&reason)),
        "{found:#?}"
    );
}

#[test]
fn a_ring_keeps_the_last_files() {
    let folder = Folder::new("ring");
    let network = Network::new(Drive::Caller).unwrap();
    let ring = CaptureRing {
        files: 2,
        size: CaptureRing::MIN_SIZE,
    };
    let options = folder.options().with_ring(ring).with_snap(CaptureSnap::All);
    network.capture(&options, None).unwrap();
    let mut pair = Pair::new(&network, ["roce", "roce"], QpType::RC);
    for _ in 0..30 {
        pair.send(5000);
    }
    let last = network.end_capture().unwrap();
    let mut names: Vec<PathBuf> = fs::read_dir(&folder.0)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    names.sort();
    assert_eq!(names.len(), 2, "{names:?}");
    assert_eq!(names[1], last);
    assert_ne!(names[0], folder.file("-1"));
    let [first, last] = [&names[0], &names[1]].map(|path| frames(path));
    assert!(fs::metadata(&names[0]).unwrap().len() < 80 << 10);
    assert!(first.last().unwrap().time <= last[0].time);
}

#[test]
fn a_full_disk_ends_the_capture_and_is_said() {
    let folder = Folder::new("full");
    let network = Network::new(Drive::Caller).unwrap();
    symlink("/dev/full", folder.file("")).unwrap();
    let refused = network.capture(&folder.options(), None).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC));
    symlink("/dev/full", folder.file("-2")).unwrap();
    let ring = CaptureRing {
        files: 8,
        size: CaptureRing::MIN_SIZE,
    };
    let options = folder.options().with_ring(ring).with_snap(CaptureSnap::All);
    let said = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&said);
    let on_end = move |path: &Path, error: &std::io::Error| {
        let entry = (path.to_owned(), error.raw_os_error());
        told.lock().unwrap().push(entry);
    };
    network.capture(&options, Some(Box::new(on_end))).unwrap();
    let mut pair = Pair::new(&network, ["roce", "roce"], QpType::RC);
    for _ in 0..30 {
        // Messages arrive all the same.
        pair.send(5000);
    }
    let expected = (folder.file("-2"), Some(libc::ENOSPC));
    assert_eq!(*said.lock().unwrap(), [expected]);
    assert!(!frames(&folder.file("-1")).is_empty());
    assert_eq!(network.end_capture(), None);
}

#[test]
fn simulated_time_is_that_of_the_frames() {
    let folder = Folder::new("simulated");
    let times = [1, 2].map(|_| {
        let network = Network::simulated(1).unwrap();
        network.capture(&folder.options(), None).unwrap();
        let mut pair = Pair::new(&network, ["roce", "roce"], QpType::RC);
        pair.send(5000);
        network.end_capture().unwrap();
        let found = frames(&folder.file(""));
        found.iter().map(|it| it.time).collect::<Vec<_>>()
    });
    assert_eq!(times[0], times[1]);
    assert!(times[0].iter().all(|time| *time < 1_000_000_000));
}
