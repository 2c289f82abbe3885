//! The quick way to read completions against the long one.

use std::mem::MaybeUninit;

use proptest::prelude::*;

use super::*;
use crate::{CompletionError, Opcode, Role, SendFlags, Shown, Timed, Usual, WorkCompletion};

/// A queue pair with one send and one receive outstanding, and its completion
/// queue.
fn outstanding() -> (CompletionRing, Device, Pair) {
    let mut ring = CompletionRing::plain(2).unwrap();
    let device = Device::of(&ring);
    let mut pair = Pair::new(70, Service::ReliableConnection, &cap(4, 1, 0));
    ring.attach(&pair.work, Role::SEND | Role::RECEIVE).unwrap();
    pair.send.begin();
    let open = pair.send.open(40, Opcode::SEND, SendFlags::SIGNALED);
    open.unwrap().no_data();
    pair.send.accept();
    pair.recv.begin().keep();
    pair.recv.push(50, &[]).unwrap();
    // SAFETY: there is no device but the test, and no memory is named.
    unsafe {
        pair.send.publish();
        pair.recv.publish();
    }
    (ring, device, pair)
}

proptest! {
    /// What goes the quick way is told as it is the other way; the rest is
    /// left as it was.
    #[test]
    fn the_quick_way_tells_what_the_long_one_does(
        (opcode, request, user_index, slot) in (0u8..=15, 0u8..0x26, 69u32..72, 0u16..2),
        (byte_count, immediate, flags_rqpn) in (any::<u32>(), any::<u32>(), any::<u32>()),
        (slid, path, time) in (any::<u16>(), any::<u8>(), any::<u64>()),
        common in any::<bool>(),
    ) {
        let raised = Raised {
            opcode: if common { [0, 2, 3][opcode as usize % 3] } else { opcode },
            request: if common { [0x0a, 0x08][request as usize % 2] } else { request },
            user_index: if common { 70 } else { user_index },
            slot: if common { 0 } else { slot },
            byte_count,
            immediate,
            flags_rqpn,
            slid,
            path,
            time,
            ..Raised::default()
        };
        let (mut quick, mut quick_device, pair) = outstanding();
        let (mut long, mut long_device, _other) = outstanding();
        quick_device.raise(&raised);
        long_device.raise(&raised);
        let mut out = MaybeUninit::<WorkCompletion>::uninit();
        // SAFETY: no work request names memory.
        match unsafe { quick.read_usual(&mut out) } {
            Usual::Taken => {
                // SAFETY: it was written.
                let wc = unsafe { out.assume_init() };
                // SAFETY: as above.
                let expected = unsafe { long.read() };
                prop_assert_eq!(expected, Some(Ok(wc)));
                prop_assert_eq!((quick.time(), quick.position()), (long.time(), 1));
                // It is outstanding no more.
                let queue = if raised.opcode == 0 { &pair.work.sends } else { &pair.work.receives };
                prop_assert_eq!(queue.find(0), None);
            }
            Usual::Nothing => prop_assert_eq!(raised.opcode, 15),
            Usual::Other => {
                prop_assert!(!common);
                prop_assert_eq!(quick.position(), 0);
                prop_assert!(pair.work.sends.find(0).is_some());
                prop_assert!(pair.work.receives.find(0).is_some());
            }
        }
    }
}

/// A queue that was read from last is not found any more once it is gone.
#[test]
fn what_is_gone_is_not_remembered() {
    let (mut ring, mut device, mut pair) = outstanding();
    let sent = Raised {
        user_index: 70,
        request: 0x0a,
        ..Raised::default()
    };
    let received = Raised { opcode: 2, ..sent };
    device.raise(&sent);
    device.raise(&received);
    let mut out = [MaybeUninit::uninit(); 2];
    // SAFETY: no work request names memory.
    assert_eq!(unsafe { ring.take(&mut out) }, Ok(2));
    ring.detach(&pair.work);
    pair.send.begin();
    let open = pair.send.open(41, Opcode::SEND, SendFlags::SIGNALED);
    open.unwrap().no_data();
    pair.send.accept();
    pair.recv.begin().keep();
    pair.recv.push(51, &[]).unwrap();
    // SAFETY: no memory is named.
    unsafe {
        pair.send.publish();
        pair.recv.publish();
    }
    let mut next = |ring: &mut CompletionRing, what| {
        device.raise(&Raised { slot: 1, ..what });
        // SAFETY: as above.
        unsafe { ring.take(&mut out) }
    };
    let unknown = Err(CompletionError::UnknownQueue { user_index: 70 });
    assert_eq!(next(&mut ring, sent), unknown);
    assert_eq!(next(&mut ring, received), unknown);
    // Its sends complete here again, and its receives do not.
    ring.attach(&pair.work, Role::SEND).unwrap();
    assert_eq!(next(&mut ring, received), unknown);
    assert_eq!(next(&mut ring, sent), Ok(1));
}

/// Reads so many completions with their times, as far as can be in rows.
fn take_timed(
    ring: &mut CompletionRing,
    count: usize,
) -> Vec<(Result<WorkCompletion, CompletionError>, u64)> {
    let mut all = Vec::new();
    while all.len() < count {
        let mut out = [MaybeUninit::<Timed>::uninit(); 6];
        // SAFETY: no work request names memory.
        let (taken, why) = unsafe { ring.take_usual(&mut out[..count - all.len()]) };
        all.extend(out[..taken].iter().map(|place| {
            // SAFETY: as many were written.
            let place = unsafe { place.assume_init() };
            (Ok(place.completion), place.time)
        }));
        if why == Usual::Other {
            // SAFETY: as above.
            let next = unsafe { ring.read() }.expect("what was left");
            all.push((next, ring.time()));
        }
        assert!(why != Usual::Nothing || all.len() == count, "too few");
    }
    ring.publish();
    all
}

proptest! {
    /// However completions of several queues and kinds follow one another, and
    /// however many are asked for: those that are read in rows are those that
    /// are read one by one.
    #[test]
    fn rows_tell_what_single_ones_do(
        log2 in 1u32..5,
        steps in prop::collection::vec((0u8..16, any::<u32>(), 0usize..6, any::<bool>()), 1..80),
    ) {
        let mut sides: Vec<_> = (0..3).map(|_| {
            let mut ring = CompletionRing::plain(log2).unwrap();
            let device = Device::of(&ring);
            // The last has the first's place among those that are remembered.
            let pairs: Vec<_> = [70, 71, 134].map(|index| {
                let pair = Pair::new(index, Service::ReliableConnection, &cap(4, 1, 0));
                ring.attach(&pair.work, Role::SEND | Role::RECEIVE).unwrap();
                pair
            }).into();
            (ring, device, pairs)
        }).collect();
        let mut told: [Vec<_>; 2] = Default::default();
        let mut raised = 0;
        for (n, (what, word, consume, take)) in (100u64..).zip(steps) {
            if raised - told[0].len() < 1 << log2 {
                raised += 1;
                for (_, device, pairs) in &mut sides {
                    let pair = &mut pairs[usize::from((what & 1) + (what >> 3))];
                    let (slot, opcode, queue) = if what & 2 != 0 {
                        let slot = pair.record(1);
                        pair.send.begin();
                        // Full, if many were not outstanding when they were read.
                        if pair.send.open(n, Opcode::SEND, SendFlags::SIGNALED).is_ok() {
                            pair.send.accept();
                        }
                        (slot, 0, 0)
                    } else {
                        let slot = pair.record(0);
                        pair.recv.begin().keep();
                        let _ = pair.recv.push(n, &[]);
                        (slot, 2 + (what >> 2 & 1), 1)
                    };
                    // SAFETY: no memory is named.
                    unsafe {
                        if queue == 0 { pair.send.publish(); } else { pair.recv.publish(); }
                    }
                    device.raise(&Raised {
                        opcode,
                        user_index: pair.work.user_index(),
                        // Some that are not outstanding, or of an odd format.
                        slot: if word % 13 == 0 { 3 } else { slot as u16 },
                        request: if word % 11 == 0 { 0x25 } else { 0x0a },
                        byte_count: word,
                        flags_rqpn: word.rotate_left(8),
                        time: n,
                        scatter: if word % 7 == 0 { 2 } else { 0 },
                        ..Raised::default()
                    });
                }
            }
            if !take {
                continue;
            }
            let (rows, others) = sides.split_at_mut(1);
            let (singles, timed) = others.split_at_mut(1);
            let ring = &mut rows[0].0;
            let before = told[0].len();
            let mut out = [MaybeUninit::<WorkCompletion>::uninit(); 6];
            // SAFETY: no work request names memory.
            match unsafe { ring.take(&mut out[..consume]) } {
                Ok(count) => for wc in &out[..count] {
                    // SAFETY: as many were written.
                    told[0].push(Ok(unsafe { wc.assume_init() }));
                },
                Err(error) => told[0].push(Err(error)),
            }
            let other = &mut singles[0].0;
            let mut times = Vec::new();
            for _ in before..told[0].len() {
                // SAFETY: as above.
                told[1].extend(unsafe { other.read() });
                times.push(other.time());
            }
            other.publish();
            let with_times = take_timed(&mut timed[0].0, told[0].len() - before);
            let (same, at): (Vec<_>, Vec<_>) = with_times.into_iter().unzip();
            prop_assert_eq!(&same, &told[1][before..]);
            prop_assert_eq!(at, times);
            prop_assert_eq!(&told[0][before..], &told[1][before..]);
            // One that makes no sense may have been looked at for no use.
            if before != told[0].len() && told[0].len() == raised {
                prop_assert_eq!(ring.time(), other.time());
            }
            prop_assert_eq!(rows[0].1.consumed(), singles[0].1.consumed());
            for (a, b) in rows[0].2.iter().zip(&singles[0].2) {
                prop_assert_eq!(a.work.sends.completed(), b.work.sends.completed());
                prop_assert_eq!(a.work.receives.completed(), b.work.receives.completed());
            }
        }
    }
}

/// A row ends with the memory, whatever is behind it.
#[test]
fn a_row_ends_where_the_ring_does() {
    let mut ring = CompletionRing::plain(1).unwrap();
    let mut device = Device::of(&ring);
    let mut pair = Pair::new(70, Service::ReliableConnection, &cap(4, 1, 0));
    ring.attach(&pair.work, Role::SEND).unwrap();
    pair.send.begin();
    for wr_id in 40..44 {
        let open = pair.send.open(wr_id, Opcode::SEND, SendFlags::SIGNALED);
        open.unwrap().no_data();
        pair.send.accept();
    }
    // SAFETY: no memory is named.
    unsafe { pair.send.publish() };
    let sent = |slot| Raised {
        user_index: 70,
        slot,
        request: 0x0a,
        ..Raised::default()
    };
    device.raise(&sent(0));
    device.raise(&sent(1));
    // As if it were the next of the row: of the same queue, and of this round.
    // SAFETY: behind the two entries is the rest of a page.
    unsafe { device.entries.add(128).cast().write(sent(2).bytes()) };
    let mut out = [MaybeUninit::<WorkCompletion>::uninit(); 4];
    // SAFETY: as above.
    assert_eq!(unsafe { ring.take(&mut out) }, Ok(2));
    device.raise(&sent(2));
    // SAFETY: as above.
    assert_eq!(unsafe { ring.take(&mut out) }, Ok(1));
    // SAFETY: it was written.
    assert_eq!(unsafe { out[0].assume_init() }.wr_id, 42);
}

proptest! {
    /// What a cursor shows is what is read, whichever way it goes, and stays so
    /// when the ring is changed meanwhile.
    #[test]
    fn what_is_shown_is_what_is_read(
        (opcode, request, user_index, slot) in (0u8..=15, 0u8..0x26, 69u32..72, 0u16..2),
        (byte_count, immediate, flags_rqpn) in (any::<u32>(), any::<u32>(), any::<u32>()),
        (slid, path, time) in (any::<u16>(), any::<u8>(), any::<u64>()),
        (common, keep, again) in any::<(bool, bool, bool)>(),
    ) {
        let raised = Raised {
            opcode: if common { [0, 2, 3][opcode as usize % 3] } else { opcode },
            request: if common { [0x0a, 0x08][request as usize % 2] } else { request },
            user_index: if common { 70 } else { user_index },
            slot: if common { 0 } else { slot },
            byte_count,
            immediate,
            flags_rqpn,
            slid,
            path,
            time,
            syndrome: 5,
            vendor: 6,
            ..Raised::default()
        };
        let (mut cursor, mut cursor_device, pair) = outstanding();
        let (mut long, mut long_device, other) = outstanding();
        cursor_device.raise(&raised);
        long_device.raise(&raised);
        let mut shown = Shown::default();
        let shown = &raw mut shown;
        // One before it had failed.
        let failed = WorkCompletion { vendor_err: 9, ..WorkCompletion::default() };
        // SAFETY: it is this test's.
        unsafe { Shown::tell(shown, &failed, 0) };
        // SAFETY: no work request names memory; it is this test's.
        let told = unsafe {
            match cursor.show_usual(shown) {
                Ok(wr_id) => Some(Ok((wr_id, 0))),
                Err(Usual::Nothing) => None,
                Err(_) => match if again { cursor.show_another(shown) } else { Err(Usual::Other) } {
                    Ok(wr_id) => Some(Ok((wr_id, 0))),
                    Err(_) => cursor.show(shown),
                },
            }
        };
        // SAFETY: as above.
        let read = unsafe { long.read() };
        prop_assert_eq!(told.is_some(), read.is_some());
        prop_assert_eq!(cursor.position(), long.position());
        let (Some(told), Some(read)) = (told, read) else { return Ok(()) };
        let Ok(wc) = read else {
            prop_assert_eq!(told.err(), read.err());
            return Ok(());
        };
        prop_assert_eq!(told, Ok((wc.wr_id, wc.status)));
        if keep {
            // SAFETY: it is this test's.
            unsafe { Shown::keep(shown) };
            cursor_device.put(0, [0xff; 64]);
        }
        // SAFETY: it was shown, and nothing published.
        unsafe {
            prop_assert_eq!(Shown::opcode(shown), wc.opcode);
            prop_assert_eq!(Shown::wc_flags(shown), wc.wc_flags);
            prop_assert_eq!(Shown::vendor_err(shown), wc.vendor_err);
            prop_assert_eq!(Shown::qp_num(shown), wc.qp_num);
            if wc.status != 0 {
                return Ok(());
            }
            prop_assert_eq!(Shown::time(shown), time);
            if wc.wc_flags & 2 != 0 {
                prop_assert_eq!(Shown::imm_data(shown), wc.ex);
            }
            if wc.opcode >= 128 {
                prop_assert_eq!(Shown::byte_len(shown), wc.byte_len);
                prop_assert_eq!(Shown::src_qp(shown), wc.src_qp);
                prop_assert_eq!(Shown::slid(shown), wc.slid);
                prop_assert_eq!(Shown::sl(shown), wc.sl);
                prop_assert_eq!(Shown::dlid_path_bits(shown), wc.dlid_path_bits);
            }
        }
        let both = [&pair, &other].map(|pair| {
            (pair.work.sends.completed(), pair.work.receives.completed())
        });
        prop_assert_eq!(both[0], both[1]);
    }
}

/// A cursor goes round and round the quick way: what the last round has left in an
/// entry is nothing, although the same slot has something outstanding again.
#[test]
fn a_cursor_takes_nothing_of_the_round_before() {
    let (mut ring, mut device, mut pair) = outstanding();
    let mut shown = Shown::default();
    let mut next = [40, 50];
    for opcode in [0, 2, 3] {
        // As many slots as entries: the old entry's slot is the one that is
        // outstanding now.
        for n in 0..13 {
            let (queue, next) = match opcode {
                0 => (&pair.work.sends, &mut next[0]),
                _ => (&pair.work.receives, &mut next[1]),
            };
            let (slot, wr_id) = (queue.completed() as u16, *next);
            *next += 1;
            // SAFETY: no work request names memory; it is this test's.
            let show = |ring: &mut CompletionRing, shown| unsafe { ring.show_usual(shown) };
            assert_eq!(show(&mut ring, &mut shown), Err(Usual::Nothing));
            device.raise(&Raised {
                opcode,
                slot,
                user_index: 70,
                request: 0x0a,
                ..Raised::default()
            });
            let told = match show(&mut ring, &mut shown) {
                // The first of its queue is looked up.
                Err(Usual::Other) if n == 0 && opcode != 3 => {
                    // SAFETY: as above.
                    unsafe { ring.show_another(&mut shown) }
                }
                told => told,
            };
            assert_eq!(told, Ok(wr_id), "{n}");
            ring.publish();
            // Its slot's turn comes again.
            pair.send.begin();
            pair.recv.begin().keep();
            if opcode == 0 {
                let open = pair.send.open(wr_id + 1, Opcode::SEND, SendFlags::SIGNALED);
                open.unwrap().no_data();
                pair.send.accept();
            } else {
                pair.recv.push(wr_id + 1, &[]).unwrap();
            }
            // SAFETY: no memory is named.
            unsafe {
                pair.send.publish();
                pair.recv.publish();
            }
        }
    }
}

/// A cursor looks a queue up when it is another's turn, and forgets one that is
/// gone.
#[test]
fn a_cursor_remembers_the_queue_read_last() {
    let (mut ring, mut device, pair) = outstanding();
    let received = Raised {
        opcode: 2,
        user_index: 70,
        ..Raised::default()
    };
    device.raise(&received);
    let mut shown = Shown::default();
    // SAFETY: no work request names memory; it is this test's.
    unsafe {
        assert_eq!(ring.show_usual(&mut shown), Err(Usual::Other));
        assert_eq!(ring.show_another(&mut shown), Ok(50));
    }
    ring.publish();
    ring.detach(&pair.work);
    device.raise(&received);
    // SAFETY: as above.
    unsafe {
        assert_eq!(ring.show_usual(&mut shown), Err(Usual::Other));
        assert_eq!(ring.show_another(&mut shown), Err(Usual::Other));
        let gone = CompletionError::UnknownQueue { user_index: 70 };
        assert_eq!(ring.show(&mut shown), Some(Err(gone)));
    }
}
