//! The layouts against the installed C headers, where there are any: each
//! becomes a static assertion of a C file.

use std::fmt::Write as _;
use std::mem::offset_of;

use testing::c_headers::{are_installed, compile};

use super::*;

/// C structure, C field, offset, size.
type Field = (&'static str, &'static str, usize, usize);

fn size_of_field<S, F>(_: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

/// The fields of a Rust structure as those of a C structure, by the same names
/// or, after a colon, by others.
macro_rules! fields {
    ($to:ident, $c:literal, $rust:ty { $($path:tt $(: $name:literal)?),+ $(,)? }) => {
        $($to.push((
            $c,
            fields!(@name $path $(, $name)?),
            offset_of!($rust, $path),
            size_of_field::<$rust, _>(|s| &s.$path),
        ));)+
    };
    (@name $path:tt, $name:literal) => { $name };
    (@name $path:tt) => { stringify!($path) };
}

fn fields() -> Vec<Field> {
    let mut to: Vec<Field> = Vec::new();
    fields!(to, "rxe_sge", Sge { addr, length, lkey });
    fields!(
        to,
        "rxe_dma_info",
        DmaInfo {
            length,
            resid,
            cur_sge,
            num_sge,
            sge_offset,
            reserved,
        }
    );
    fields!(
        to,
        "rxe_send_wr",
        SendWr {
            wr_id,
            reserved,
            opcode,
            send_flags,
            ex,
            wr,
        }
    );
    fields!(
        to,
        "rxe_send_wqe",
        SendWqe {
            wr,
            status,
            state,
            iova,
            mask,
            first_psn,
            last_psn,
            ack_length,
            ssn,
            has_rd_atomic,
            dma,
        }
    );
    fields!(
        to,
        "rxe_recv_wqe",
        RecvWqe {
            wr_id,
            reserved,
            padding,
            dma
        }
    );
    fields!(to, "mminfo", MmapInfo { offset, size, pad });
    fields!(
        to,
        "rxe_create_qp_resp",
        CreateQpResp {
            recv: "rq_mi",
            send: "sq_mi"
        }
    );
    fields!(
        to,
        "rxe_create_srq_resp",
        CreateSrqResp {
            queue: "mi",
            srq_num,
            reserved
        }
    );
    fields!(to, "rxe_modify_srq_cmd", ModifySrqCmd { mmap_info_addr });
    fields!(to, "rxe_create_ah_resp", CreateAhResp { ah_num, reserved });
    // What is behind the work request's union, seen from the work request.
    let union_at = offset_of!(SendWr, wr);
    let mut operands: Vec<Field> = Vec::new();
    fields!(
        operands,
        "rxe_send_wr",
        RdmaWr {
            remote_addr: "wr.rdma.remote_addr",
            rkey: "wr.rdma.rkey",
            reserved: "wr.rdma.reserved",
        }
    );
    fields!(
        operands,
        "rxe_send_wr",
        AtomicWr {
            remote_addr: "wr.atomic.remote_addr",
            compare_add: "wr.atomic.compare_add",
            swap: "wr.atomic.swap",
            rkey: "wr.atomic.rkey",
            reserved: "wr.atomic.reserved",
        }
    );
    fields!(
        operands,
        "rxe_send_wr",
        FlushWr {
            remote_addr: "wr.flush.remote_addr",
            length: "wr.flush.length",
            rkey: "wr.flush.rkey",
            kind: "wr.flush.type",
            level: "wr.flush.level",
        }
    );
    fields!(
        operands,
        "rxe_send_wr",
        UdWr {
            remote_qpn: "wr.ud.remote_qpn",
            remote_qkey: "wr.ud.remote_qkey",
            pkey_index: "wr.ud.pkey_index",
            reserved: "wr.ud.reserved",
            ah_num: "wr.ud.ah_num",
            pad: "wr.ud.pad",
            av: "wr.ud.av",
        }
    );
    fields!(
        operands,
        "rxe_send_wr",
        BindMwWr {
            addr: "wr.mw.addr",
            length: "wr.mw.length",
            mr_lkey: "wr.mw.mr_lkey",
            mw_rkey: "wr.mw.mw_rkey",
            rkey: "wr.mw.rkey",
            access: "wr.mw.access",
        }
    );
    to.extend(
        operands
            .into_iter()
            .map(|(c, name, offset, size)| (c, name, union_at + offset, size)),
    );
    to
}

/// C structure, size.
fn sizes() -> Vec<(&'static str, usize)> {
    vec![
        ("rxe_sge", size_of::<Sge>()),
        ("rxe_dma_info", size_of::<DmaInfo>()),
        ("rxe_send_wr", size_of::<SendWr>()),
        ("rxe_send_wqe", size_of::<SendWqe>()),
        ("rxe_recv_wqe", size_of::<RecvWqe>()),
        ("mminfo", size_of::<MmapInfo>()),
        ("rxe_create_cq_resp", size_of::<MmapInfo>()),
        ("rxe_resize_cq_resp", size_of::<MmapInfo>()),
        ("rxe_create_qp_resp", size_of::<CreateQpResp>()),
        ("rxe_create_srq_resp", size_of::<CreateSrqResp>()),
        ("rxe_modify_srq_cmd", size_of::<ModifySrqCmd>()),
        ("rxe_create_ah_resp", size_of::<CreateAhResp>()),
        ("rxe_queue_buf", size_of::<ring::Header>()),
    ]
}

/// Operation codes by the kernel's names.
const OPCODES: &[(&str, crate::Opcode)] = &[
    ("IB_UVERBS_WR_RDMA_WRITE", crate::Opcode::RDMA_WRITE),
    (
        "IB_UVERBS_WR_RDMA_WRITE_WITH_IMM",
        crate::Opcode::RDMA_WRITE_WITH_IMM,
    ),
    ("IB_UVERBS_WR_SEND", crate::Opcode::SEND),
    ("IB_UVERBS_WR_SEND_WITH_IMM", crate::Opcode::SEND_WITH_IMM),
    ("IB_UVERBS_WR_RDMA_READ", crate::Opcode::RDMA_READ),
    (
        "IB_UVERBS_WR_ATOMIC_CMP_AND_SWP",
        crate::Opcode::ATOMIC_CMP_AND_SWP,
    ),
    (
        "IB_UVERBS_WR_ATOMIC_FETCH_AND_ADD",
        crate::Opcode::ATOMIC_FETCH_AND_ADD,
    ),
    ("IB_UVERBS_WR_LOCAL_INV", crate::Opcode::LOCAL_INV),
    ("IB_UVERBS_WR_BIND_MW", crate::Opcode::BIND_MW),
    ("IB_UVERBS_WR_SEND_WITH_INV", crate::Opcode::SEND_WITH_INV),
    ("IB_UVERBS_WR_FLUSH", crate::Opcode::FLUSH),
    ("IB_UVERBS_WR_ATOMIC_WRITE", crate::Opcode::ATOMIC_WRITE),
];

const INCLUDES: &str = "#include <stddef.h>\n\
    #include <rdma/ib_user_verbs.h>\n\
    #include <rdma/rdma_user_rxe.h>\n";

fn assertions() -> String {
    let mut c = INCLUDES.to_owned();
    let mut assert = |what: String| {
        let _ = writeln!(c, "_Static_assert({what}, {what:?});");
    };
    for (name, size) in sizes() {
        assert(format!("sizeof(struct {name}) == {size}"));
    }
    for (name, field, offset, size) in fields() {
        assert(format!("offsetof(struct {name}, {field}) == {offset}"));
        assert(format!("sizeof(((struct {name} *)0)->{field}) == {size}"));
    }
    for (name, opcode) in OPCODES {
        assert(format!("{name} == {}", opcode.0));
    }
    c
}

#[test]
fn the_c_headers_agree() {
    if !are_installed(INCLUDES, "linux-libc-dev") {
        return;
    }
    // Not in the headers of older distributions: these two came with Linux 6.2
    // and 6.3, the flush structure with the latter.
    let newest =
        format!("{INCLUDES}int newest = IB_UVERBS_WR_ATOMIC_WRITE + IB_UVERBS_WR_FLUSH;\n");
    let c = assertions();
    let c = match compile(&newest) {
        Some(Ok(())) => c,
        _ => {
            testing::skip!("the C headers have no atomic write and flush");
            let old = |line: &&str| {
                !["flush", "WR_FLUSH", "WR_ATOMIC_WRITE"]
                    .iter()
                    .any(|new| line.contains(new))
            };
            c.lines().filter(old).collect::<Vec<_>>().join("\n")
        }
    };
    if let Some(Err(complaints)) = compile(&c) {
        panic!("{complaints}");
    }
    // And the assertions do assert.
    let wrong = c.replace(
        "sizeof(struct rxe_sge) == 16",
        "sizeof(struct rxe_sge) == 1",
    );
    assert_ne!(wrong, c);
    assert!(matches!(compile(&wrong), Some(Err(_))));
}
