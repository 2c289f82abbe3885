//! Connected queue pairs: everything that they do, in each way that the
//! device can be driven.

mod driver;

use driver::*;
use uverbs::QpType;

const RECEIVED: u32 = 128;

#[test]
fn a_message_goes_through_a_device() {
    for profile in ["ib", "roce"] {
        let host = Host::alone(profile);
        let mut cq = host.cq(16);
        let mut a = host.qp(QpType::RC, &mut cq);
        let mut b = host.qp(QpType::RC, &mut cq);
        join(QpType::RC, (&a, &host), (&b, &host));
        let (from, to) = (host.memory(64), host.memory(64));
        from.set(0, &[0x5a; 64]);
        receive(&mut b, 2, to.sge(0, 64));
        post(&mut a, 1, Work::Send, from.sge(0, 64));
        let mut got = [wait(&mut cq), wait(&mut cq)];
        got.sort_by_key(|wc| wc.wr_id);
        assert_eq!((got[0].status, got[0].wr_id), (0, 1), "{profile}");
        assert_eq!((got[1].status, got[1].opcode), (0, RECEIVED));
        assert_eq!((got[1].byte_len, got[1].qp_num), (64, b.object.qp_num()));
        assert_eq!(to.get(0, 64), [0x5a; 64]);
        assert!(host.embedded.complaints().is_empty());
    }
}
