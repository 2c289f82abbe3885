//! Messages between queue pairs of one device, which are copied once: every byte arrives at
//! its place for all lengths, alignments and lists.

use device_testing::embedded::driver::*;
use proptest::prelude::*;
use ringverbs_embedded::{Drive, Network};
use uverbs::{Data, Opcode, QpType, RemoteMemory, SendFlags, SendWr, Sge};

/// Payload of a packet.
const MTU: usize = 4096;
/// Bytes of each of the two pieces of memory.
const SIZE: usize = 40_000;

/// A range of a piece of memory.
type Range = (usize, usize, usize);

fn range(max_length: usize) -> impl Strategy<Value = Range> {
    let length = prop_oneof![1..200usize, 4000..4200usize, 1..max_length];
    (0..2usize, 0..5000usize, length)
}

struct Device {
    host: Host,
    cq: Cq,
    a: Qp,
    b: Qp,
    memory: [Memory; 2],
    model: [Vec<u8>; 2],
}

impl Device {
    fn new(profile: &str) -> Self {
        let network = Network::new(Drive::Caller).unwrap();
        let host = Host::new(&network.strict_device(profile).unwrap());
        let mut cq = host.cq(64);
        let (a, b) = (host.qp(QpType::RC, &mut cq), host.qp(QpType::RC, &mut cq));
        connect_pair(QpType::RC, (&a, &host), (&b, &host));
        let memory = [host.memory(SIZE), host.memory(SIZE)];
        let model = [1u32, 2].map(|seed| {
            let byte = |n: u32| (n.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 13) as u8;
            (0..SIZE as u32).map(byte).collect::<Vec<u8>>()
        });
        for (memory, model) in memory.iter().zip(&model) {
            memory.set(0, model);
        }
        Self {
            host,
            cq,
            a,
            b,
            memory,
            model,
        }
    }

    fn sges(&self, ranges: &[Range]) -> Vec<Sge> {
        let sge = |&(piece, at, length): &Range| self.memory[piece].sge(at, length);
        ranges.iter().map(sge).collect()
    }

    fn post(&mut self, opcode: Opcode, list: &[Sge], (piece, at, _): Range) {
        let wr = SendWr {
            remote: RemoteMemory {
                addr: self.memory[piece].address() + at as u64,
                rkey: self.memory[piece].keys.rkey,
            },
            data: Data::Sges(list),
            ..SendWr::new(1, opcode, SendFlags::SIGNALED)
        };
        self.a.send.begin();
        // SAFETY: the memory is kept until the completion is read.
        unsafe {
            self.a.send.push(&wr).unwrap();
            assert!(self.a.send.publish());
        }
    }

    fn wait(&mut self, completions: usize) {
        for _ in 0..completions {
            assert_eq!(poll(&self.host, &mut self.cq).status, 0);
        }
    }

    /// Copies the ranges in the model, and compares the memory with it.
    fn check_copy(&mut self, from: &[Range], to: &[Range]) {
        let bytes = from
            .iter()
            .flat_map(|&(piece, at, length)| self.model[piece][at..at + length].to_vec());
        let mut bytes = bytes.collect::<Vec<u8>>().into_iter();
        for &(piece, at, length) in to {
            for (place, byte) in self.model[piece][at..at + length]
                .iter_mut()
                .zip(&mut bytes)
            {
                *place = byte;
            }
        }
        for (memory, model) in self.memory.iter().zip(&self.model) {
            assert!(memory.get(0, SIZE) == *model, "{from:?} {to:?}");
        }
    }
}

/// Returns whether a message of more than one packet is read where it is written: the
/// result is not specified.
fn has_unspecified_result(from: &[Range], to: &[Range], length: usize) -> bool {
    let common = |a: &Range, b: &Range| a.0 == b.0 && a.1 < b.1 + b.2 && b.1 < a.1 + a.2;
    length > MTU && from.iter().any(|a| to.iter().any(|b| common(a, b)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn messages_are_copied_exactly(
        ethernet in proptest::bool::ANY,
        steps in proptest::collection::vec(
            (
                proptest::collection::vec(range(9000), 1..=2),
                range(18_000),
                (proptest::bool::ANY, 0..20_000usize),
                0..4usize,
            ),
            1..60,
        ),
    ) {
        let mut device = Device::new(if ethernet { "roce" } else { "ib" });
        for (from, mut to, (send, split), same) in steps {
            let length: usize = from.iter().map(|range| range.2).sum();
            if same == 0 {
                // The same alignment, for which whole blocks are copied.
                to.1 = to.1 / 16 * 16 + from[0].1 % 16;
            }
            to.2 = length;
            let first = split % length;
            let into = match send && first != 0 {
                true => vec![(to.0, to.1, first), (1 - to.0, to.1 + 7, length - first)],
                false => vec![to],
            };
            if has_unspecified_result(&from, &into, length) {
                continue;
            }
            let (from_list, into_list) = (device.sges(&from), device.sges(&into));
            if send {
                let recv = device.b.recv.as_mut().unwrap();
                recv.begin();
                recv.push(2, &into_list).unwrap();
                // SAFETY: the memory is kept until the completion is read.
                unsafe { recv.publish() };
                device.post(Opcode::SEND, &from_list, to);
                device.wait(2);
            } else {
                device.post(Opcode::RDMA_WRITE, &from_list, to);
                device.wait(1);
            }
            device.check_copy(&from, &into);
        }
    }
}
