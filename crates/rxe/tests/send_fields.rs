//! What each operation writes into an entry of the send queue, byte by byte
//! where the driver reads it.

use device_testing::rxe::{Driver, UNWRITTEN, layout, layout::send::*};
use ringverbs_rxe::{
    Bind, Data, Destination, Opcode, Operands, RemoteMemory, SendFlags, SendQueue, SendWr, Sge,
};
use uverbs::MwType;

const LOG2_STRIDE: u32 = 9;
const MAX_SGE: u32 = 8;
const MAX_INLINE: u32 = 200;

const WR_ID_VALUE: u64 = 0x0102_0304_0506_0708;
const REMOTE: u64 = 0x1112_1314_1516_1718;
const KEY: u32 = 0x2122_2324;
const MEMORY: RemoteMemory = RemoteMemory {
    addr: REMOTE,
    rkey: KEY,
};
const IMM: u32 = 0x3132_3334;
const SGE: Sge = Sge {
    addr: 0x4142_4344_4546_4748,
    length: 0x0051_5253,
    lkey: 0x6162_6364,
};

fn queue() -> (Driver, SendQueue) {
    let driver = Driver::new(LOG2_STRIDE, 4);
    let queue = SendQueue::new(driver.ring(SendQueue::ENTRY_SIZE), MAX_SGE, MAX_INLINE);
    (driver, queue)
}

/// Posts one work request into a stale entry, and checks what every operation
/// has, the length, and what lies behind the fixed part: `data`, and not one
/// byte more. Gives the entry.
#[track_caller]
fn post(
    what: &str,
    opcode: (Opcode, u64),
    flags: SendFlags,
    (length, num_sge): (u32, u32),
    data: &[u8],
    set: impl FnOnce(&mut SendWr<'_, u32>),
) -> Vec<u8> {
    let (driver, mut queue) = queue();
    let mut wr = SendWr::new(WR_ID_VALUE, opcode.0, flags);
    set(&mut wr);
    // SAFETY: no inline data.
    unsafe { queue.push(&wr) }.unwrap();
    // SAFETY: nobody reads the memory that the entry names.
    assert!(unsafe { queue.publish() });
    assert_eq!(driver.producer(), 1, "{what}");
    assert!(driver.unwritten_except(&[0]), "{what}: another entry");
    let entry = driver.entry(0);
    layout::check(
        what,
        &entry,
        &[
            (WR_ID, WR_ID_VALUE),
            (OPCODE, opcode.1),
            // There is no inline data.
            (SEND_FLAGS, (flags - SendFlags::INLINE).bits().into()),
            // Progress, which the driver takes up where it finds it.
            (STATUS, 0),
            (STATE, 0),
            (DMA_LENGTH, length.into()),
            (DMA_RESID, length.into()),
            (DMA_CUR_SGE, 0),
            (DMA_NUM_SGE, num_sge.into()),
            (DMA_SGE_OFFSET, 0),
        ],
    );
    assert_eq!(&entry[DATA..DATA + data.len()], data, "{what}: data");
    assert!(
        entry[DATA + data.len()..]
            .iter()
            .all(|&byte| byte == UNWRITTEN),
        "{what}: written beyond its data"
    );
    entry
}

/// Posts an operation on one element.
#[track_caller]
fn post_sge(what: &str, opcode: (Opcode, u64), set: impl FnOnce(&mut SendWr<'_, u32>)) -> Vec<u8> {
    let flags = SendFlags::SIGNALED | SendFlags::FENCE;
    let data = layout::sges(&[SGE]);
    post(what, opcode, flags, (SGE.length, 1), &data, |wr| {
        set(wr);
        wr.data = Data::Sges(&[SGE]);
    })
}

#[test]
fn sends() {
    post_sge("send", (Opcode::SEND, 2), |_| ());
    for (what, opcode) in [
        ("send with immediate", (Opcode::SEND_WITH_IMM, 3)),
        ("send with invalidate", (Opcode::SEND_WITH_INV, 9)),
    ] {
        let entry = post_sge(what, opcode, |wr| wr.imm_or_key = IMM);
        layout::check(what, &entry, &[(EX, IMM.into())]);
    }
}

#[test]
fn writes_and_reads() {
    for (what, opcode) in [
        ("write", (Opcode::RDMA_WRITE, 0)),
        ("write with immediate", (Opcode::RDMA_WRITE_WITH_IMM, 1)),
        ("read", (Opcode::RDMA_READ, 4)),
        ("send with invalidate", (Opcode::SEND_WITH_INV, 9)),
    ] {
        let entry = post_sge(what, opcode, |wr| {
            wr.remote = MEMORY;
            wr.imm_or_key = IMM;
        });
        layout::check(
            what,
            &entry,
            &[
                (EX, IMM.into()),
                (RDMA_REMOTE_ADDR, REMOTE),
                (RDMA_RKEY, KEY.into()),
                // The driver goes on from here.
                (IOVA, REMOTE),
            ],
        );
    }
}

#[test]
fn atomics() {
    for (what, opcode) in [
        ("compare and swap", (Opcode::ATOMIC_CMP_AND_SWP, 5)),
        ("fetch and add", (Opcode::ATOMIC_FETCH_AND_ADD, 6)),
    ] {
        let (compare_add, swap) = (0x7172_7374_7576_7778, 0x8182_8384_8586_8788);
        let entry = post_sge(what, opcode, |wr| {
            wr.remote = MEMORY;
            wr.operands = Operands::Atomic { compare_add, swap };
        });
        layout::check(
            what,
            &entry,
            &[
                (ATOMIC_REMOTE_ADDR, REMOTE),
                (ATOMIC_COMPARE_ADD, compare_add),
                (ATOMIC_SWAP, swap),
                (ATOMIC_RKEY, KEY.into()),
                (IOVA, REMOTE),
            ],
        );
    }
}

#[test]
fn atomic_write() {
    let value = [1, 2, 3, 4, 5, 6, 7, 8];
    let opcode = (Opcode::ATOMIC_WRITE, 15);
    let flags = SendFlags::SIGNALED;
    let entry = post("atomic write", opcode, flags, (8, 0), &value, |wr| {
        wr.remote = MEMORY;
        wr.operands = Operands::AtomicWrite(value);
    });
    layout::check(
        "atomic write",
        &entry,
        &[
            (RDMA_REMOTE_ADDR, REMOTE),
            (RDMA_RKEY, KEY.into()),
            (IOVA, REMOTE),
        ],
    );
}

#[test]
fn flush() {
    let length = 0x0091_9293;
    let opcode = (Opcode::FLUSH, 14);
    let flags = SendFlags::empty();
    for (placement, level) in [(1, 0), (2, 1), (3, 0)] {
        let entry = post("flush", opcode, flags, (length, 0), &[], |wr| {
            wr.remote = MEMORY;
            wr.operands = Operands::Flush {
                length,
                placement,
                level,
            };
        });
        layout::check(
            "flush",
            &entry,
            &[
                (FLUSH_REMOTE_ADDR, REMOTE),
                (FLUSH_LENGTH, length.into()),
                (FLUSH_RKEY, KEY.into()),
                (FLUSH_TYPE, placement.into()),
                (FLUSH_LEVEL, level.into()),
                (IOVA, REMOTE),
            ],
        );
    }
}

#[test]
fn local_operations() {
    let flags = SendFlags::SIGNALED;
    let opcode = (Opcode::LOCAL_INV, 7);
    let entry = post("local invalidate", opcode, flags, (0, 0), &[], |wr| {
        wr.imm_or_key = KEY;
    });
    layout::check("local invalidate", &entry, &[(EX, KEY.into())]);

    let bind = Bind {
        addr: 0xa1a2_a3a4_a5a6_a7a8,
        length: 0xb1b2_b3b4_b5b6_b7b8,
        lkey: 0xc1c2_c3c4,
        window_rkey: 0xd1d2_d3d4,
        window_type: MwType::TYPE_2,
        rkey: 0xe1e2_e3e4,
        access: 0xf1f2_f3f4,
    };
    let (driver, mut queue) = queue();
    let wr = SendWr {
        operands: Operands::Bind(&bind),
        ..SendWr::new(1, Opcode::BIND_MW, flags)
    };
    // SAFETY: no inline data.
    unsafe { queue.push(&wr) }.unwrap();
    let entry = driver.entry(0);
    layout::check(
        "bind",
        &entry,
        &[
            (OPCODE, 8),
            (DMA_LENGTH, 0),
            (DMA_RESID, 0),
            (DMA_NUM_SGE, 0),
            (MW_ADDR, bind.addr),
            (MW_LENGTH, bind.length),
            (MW_MR_LKEY, bind.lkey.into()),
            (MW_MW_RKEY, bind.window_rkey.into()),
            (MW_RKEY, bind.rkey.into()),
            (MW_ACCESS, bind.access.into()),
        ],
    );
}

#[test]
fn datagrams() {
    let entry = post_sge("datagram", (Opcode::SEND_WITH_IMM, 3), |wr| {
        wr.destination = Destination::Datagram {
            address: &0x0a0b_0c0d,
            remote_qpn: 0x0012_3456,
            remote_qkey: 0x8001_0203,
        };
        wr.imm_or_key = IMM;
    });
    layout::check(
        "datagram",
        &entry,
        &[
            (EX, IMM.into()),
            (UD_REMOTE_QPN, 0x0012_3456),
            (UD_REMOTE_QKEY, 0x8001_0203),
            (UD_PKEY_INDEX, 0),
            (UD_AH_NUM, 0x0a0b_0c0d),
        ],
    );
}

#[test]
fn flags_are_those_of_libibverbs_and_pass_unknown_ones() {
    for (flags, bits) in [
        (SendFlags::FENCE, 1),
        (SendFlags::SIGNALED, 2),
        (SendFlags::SOLICITED, 4),
        (SendFlags::INLINE, 8),
        (SendFlags::from_bits_retain(0xf000_0010), 0xf000_0010),
    ] {
        assert_eq!(flags.bits(), bits);
        post("flags", (Opcode::SEND, 2), flags, (0, 0), &[], |_| ());
    }
}

#[test]
fn the_inline_flag_is_that_of_the_data() {
    let others = SendFlags::SIGNALED | SendFlags::SOLICITED;
    for (flags, inline) in [
        (others, true),
        (others | SendFlags::INLINE, true),
        (others | SendFlags::INLINE, false),
        (others, false),
    ] {
        for data in [&[][..], &[Sge::default()], &[Sge::default(); 2]] {
            let (driver, mut queue) = queue();
            let wr = SendWr {
                data: match inline {
                    true => Data::Inline(data),
                    false => Data::Sges(data),
                },
                ..SendWr::new(1, Opcode::SEND, flags)
            };
            // SAFETY: no bytes.
            unsafe { queue.push(&wr) }.unwrap();
            let expected = others.bits() | if inline { 8 } else { 0 };
            assert_eq!(
                layout::read(&driver.entry(0), SEND_FLAGS),
                u64::from(expected)
            );
        }
    }
}
