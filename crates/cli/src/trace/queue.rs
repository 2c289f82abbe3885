//! Queues and entries as they are printed.

use rxe::inspect::{Completion, Kind, ReceiveEntry, Remote, SendEntry, Snapshot};
use rxe::{SendFlags, Sge};
use serde::Serialize;
use uverbs::{completed_opcode_name, opcode_name};

use super::process::{Mapping, Process};

/// Number of entries from which a queue's type is determined.
const KIND_SAMPLE: u32 = 64;

/// A queue's type, as given on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum QueueKind {
    /// Completion queue
    Cq,
    /// Send queue
    Sq,
    /// Receive queue, of a queue pair or shared
    Rq,
}

impl From<QueueKind> for Kind {
    fn from(kind: QueueKind) -> Self {
        match kind {
            QueueKind::Cq => Self::Completion,
            QueueKind::Sq => Self::Send,
            QueueKind::Rq => Self::Receive,
        }
    }
}

/// A snapshot of a queue.
#[derive(Debug, Serialize)]
pub struct Queue {
    pub device: String,
    pub offset: u64,
    pub address: u64,
    /// `None` if the type cannot be determined from the entries.
    pub kind: Option<&'static str>,
    pub entry_bytes: usize,
    pub capacity: u32,
    pub producer: u32,
    pub consumer: u32,
    pub pending: u32,
    /// Whether an index moved while entries were copied.
    pub moving: bool,
    /// Oldest first.
    pub entries: Vec<Entry>,
}

/// An entry.
#[derive(Debug, Serialize)]
pub struct Entry {
    pub slot: u32,
    /// Whether the entry is produced and not consumed.
    pub pending: bool,
    #[serde(flatten)]
    pub content: EntryContent,
}

/// The content of an entry.
#[derive(Debug, Serialize)]
#[serde(tag = "entry", rename_all = "lowercase")]
pub enum EntryContent {
    /// A work completion.
    Completion {
        wr_id: u64,
        status: String,
        opcode: String,
        byte_len: u32,
        qp_num: u32,
        src_qp: u32,
        flags: u32,
    },
    /// A send work request.
    Send {
        wr_id: u64,
        opcode: String,
        flags: Vec<&'static str>,
        state: String,
        length: u32,
        left: u32,
        first_psn: u32,
        last_psn: u32,
        #[serde(skip_serializing_if = "Option::is_none")]
        remote: Option<String>,
        sges: Vec<Element>,
    },
    /// A receive work request.
    Receive {
        wr_id: u64,
        length: u32,
        left: u32,
        sges: Vec<Element>,
    },
    /// An entry of a queue of unknown type.
    Unknown,
}

/// A scatter/gather element.
#[derive(Debug, Serialize)]
pub struct Element {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

impl Queue {
    /// Copies the last entries of a queue. `None` if the mapping is not a queue
    /// of rxe, or is unmapped.
    pub fn read(
        process: &Process,
        mapping: &Mapping,
        requested: Option<QueueKind>,
        last: u32,
    ) -> Option<Self> {
        let snapshot = || {
            let header = process.copy(mapping, 0, rxe::inspect::HEADER)?;
            Snapshot::read(&header, mapping.length)
        };
        let copy = |slot: u32, of: &Snapshot| process.copy(mapping, of.offset(slot), of.stride);
        let before = snapshot()?;
        // One slot is always free: the oldest entry is in the slot after it.
        let entries = |count: u32| -> Vec<(u32, Vec<u8>)> {
            let slots = (1..=count.min(before.capacity)).rev();
            let slots = slots.map(|back| before.before(back));
            let entries = slots.filter_map(|slot| Some((slot, copy(slot, &before)?)));
            // The driver's memory is initially zero: an entry of zeros was never written.
            let written = |bytes: &[u8]| bytes.iter().any(|byte| *byte != 0);
            entries.filter(|(_, bytes)| written(bytes)).collect()
        };
        let shown = entries(last);
        let kind = requested.map(Kind::from).or_else(|| {
            let sample = entries(KIND_SAMPLE);
            Kind::of(sample.iter().map(|(_, bytes)| bytes.as_slice()))
        });
        let after = snapshot()?;
        let entries = shown.into_iter().map(|(slot, bytes)| Entry {
            slot,
            pending: before.is_pending(slot),
            content: EntryContent::of(kind, &bytes),
        });
        Some(Self {
            device: mapping.node.clone(),
            offset: mapping.offset,
            address: mapping.address,
            kind: kind.map(kind_name),
            entry_bytes: before.stride,
            capacity: before.capacity,
            producer: before.producer,
            consumer: before.consumer,
            pending: before.pending(),
            moving: before != after,
            entries: entries.collect(),
        })
    }
}

fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Completion => "completion queue",
        Kind::Send => "send queue",
        Kind::Receive => "receive queue",
    }
}

impl EntryContent {
    /// Decodes an entry.
    pub fn of(kind: Option<Kind>, bytes: &[u8]) -> Self {
        let decoded = match kind {
            Some(Kind::Completion) => Completion::read(bytes).map(Self::completion),
            Some(Kind::Send) => SendEntry::read(bytes).map(Self::send),
            Some(Kind::Receive) => ReceiveEntry::read(bytes).map(|entry| Self::Receive {
                wr_id: entry.wr_id,
                length: entry.data.length,
                left: entry.data.resid,
                sges: elements(&entry.data.list),
            }),
            None => None,
        };
        decoded.unwrap_or(Self::Unknown)
    }

    fn completion(Completion(wc): Completion) -> Self {
        Self::Completion {
            wr_id: wc.wr_id,
            status: status(wc.status),
            opcode: name_or_number(completed_opcode_name(wc.opcode), wc.opcode, "opcode"),
            byte_len: wc.byte_len,
            qp_num: wc.qp_num,
            src_qp: wc.src_qp,
            flags: wc.wc_flags,
        }
    }

    fn send(entry: SendEntry) -> Self {
        let flags = [
            (SendFlags::FENCE, "FENCE"),
            (SendFlags::SIGNALED, "SIGNALED"),
            (SendFlags::SOLICITED, "SOLICITED"),
            (SendFlags::INLINE, "INLINE"),
        ];
        let flags = flags.iter().filter(|(flag, _)| entry.flags.contains(*flag));
        let state = match entry.state_name() {
            Some("error") => format!("error: {}", status(entry.status)),
            Some(name) => name.into(),
            None => format!("state {}", entry.state),
        };
        Self::Send {
            wr_id: entry.wr_id,
            opcode: name_or_number(opcode_name(entry.opcode.0), entry.opcode.0, "opcode"),
            flags: flags.map(|(_, name)| *name).collect(),
            state,
            length: entry.data.length,
            left: entry.data.resid,
            first_psn: entry.first_psn,
            last_psn: entry.last_psn,
            remote: match entry.remote {
                Remote::Memory { addr, rkey } => Some(format!("{addr:#x} rkey {rkey:#x}")),
                Remote::Datagram { qpn, ah } if qpn != 0 || ah != 0 => {
                    Some(format!("QP {qpn:#x} AH {ah}"))
                }
                _ => None,
            },
            sges: elements(&entry.data.list),
        }
    }
}

fn elements(list: &[Sge]) -> Vec<Element> {
    let element = |sge: &Sge| Element {
        addr: sge.addr,
        length: sge.length,
        lkey: sge.lkey,
    };
    list.iter().map(element).collect()
}

/// Returns the name of a number, or `kind` and the number.
fn name_or_number(name: Option<&str>, number: u32, kind: &str) -> String {
    name.map_or_else(|| format!("{kind} {number}"), str::to_owned)
}

fn status(status: u32) -> String {
    let name = usize::try_from(status)
        .ok()
        .and_then(|at| WC_STATUSES.get(at));
    name_or_number(name.copied(), status, "status")
}

/// Work completion statuses (`enum ibv_wc_status`).
const WC_STATUSES: &[&str] = &[
    "SUCCESS",
    "LOC_LEN_ERR",
    "LOC_QP_OP_ERR",
    "LOC_EEC_OP_ERR",
    "LOC_PROT_ERR",
    "WR_FLUSH_ERR",
    "MW_BIND_ERR",
    "BAD_RESP_ERR",
    "LOC_ACCESS_ERR",
    "REM_INV_REQ_ERR",
    "REM_ACCESS_ERR",
    "REM_OP_ERR",
    "RETRY_EXC_ERR",
    "RNR_RETRY_EXC_ERR",
    "LOC_RDD_VIOL_ERR",
    "REM_INV_RD_REQ_ERR",
    "REM_ABORT_ERR",
    "INV_EECN_ERR",
    "INV_EEC_STATE_ERR",
    "FATAL_ERR",
    "RESP_TIMEOUT_ERR",
    "GENERAL_ERR",
    "TM_ERR",
    "TM_RNDV_INCOMPLETE",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_codes_are_shown_as_numbers() {
        let opcode = |number| name_or_number(opcode_name(number), number, "opcode");
        assert_eq!(opcode(2), "SEND");
        assert_eq!(opcode(13), "opcode 13");
        assert_eq!(status(5), "WR_FLUSH_ERR");
        assert_eq!(status(u32::MAX), "status 4294967295");
        assert_eq!(WC_STATUSES.len(), 24);
    }

    #[test]
    fn undecodable_entries_are_unknown() {
        assert!(matches!(
            EntryContent::of(None, &[1; 64]),
            EntryContent::Unknown
        ));
        assert!(matches!(
            EntryContent::of(Some(Kind::Send), &[1; 64]),
            EntryContent::Unknown
        ));
        assert!(matches!(
            EntryContent::of(Some(Kind::Completion), &[]),
            EntryContent::Unknown
        ));
    }

    /// Reads a queue of this process as if it were that of another one.
    #[test]
    fn a_queue_is_read_from_memory() {
        let mut memory = vec![0u8; 4096];
        let put = |memory: &mut [u8], at: usize, value: u32| {
            memory[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        };
        // 64-byte entries, eight slots, producer 3, consumer 2.
        for (at, value) in [(0, 6), (4, 7), (128, 3), (256, 2)] {
            put(&mut memory, at, value);
        }
        for slot in 0..3 {
            let entry = 384 + slot * 64;
            put(&mut memory, entry, 70 + slot as u32);
            put(&mut memory, entry + 12, 128);
            put(&mut memory, entry + 20, 4096);
            put(&mut memory, entry + 28, 0x11);
        }
        put(&mut memory, 384 + 2 * 64 + 8, 12);
        let process = Process::open(std::process::id()).unwrap();
        let mapping = Mapping {
            address: memory.as_ptr().addr() as u64,
            length: memory.len(),
            offset: 0x1000,
            node: "uverbs0".into(),
        };
        let queue = Queue::read(&process, &mapping, None, 8).unwrap();
        assert_eq!(queue.kind, Some("completion queue"));
        assert_eq!((queue.pending, queue.capacity, queue.moving), (1, 7, false));
        let shown: Vec<_> = queue
            .entries
            .iter()
            .map(|entry| match &entry.content {
                EntryContent::Completion { wr_id, status, .. } => {
                    (entry.slot, entry.pending, *wr_id, status.as_str())
                }
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(
            shown,
            [
                (0, false, 70, "SUCCESS"),
                (1, false, 71, "SUCCESS"),
                (2, true, 72, "RETRY_EXC_ERR"),
            ]
        );
        let json = serde_json::to_value(&queue).unwrap();
        assert_eq!(json["entries"][2]["entry"], "completion");
        assert_eq!(json["entries"][2]["pending"], true);
        // An index mask beyond the mapping: not a queue.
        put(&mut memory, 4, 1023);
        assert!(Queue::read(&process, &mapping, None, 8).is_none());
    }
}
