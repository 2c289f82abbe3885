//! The data of a send work request: scatter lists, inline copies, limits.

mod common;

use common::{Driver, STALE, layout, layout::send::*};
use ringverbs_rxe::{MAX_MESSAGE, OneElement, Opcode, PostError, SendFlags, SendQueue, Sge};

const MAX_SGE: u32 = 6;
const MAX_INLINE: u32 = 100;

fn queue() -> (Driver, SendQueue) {
    queue_with(MAX_SGE, MAX_INLINE)
}

fn queue_with(max_sge: u32, max_inline: u32) -> (Driver, SendQueue) {
    let driver = Driver::new(9, 4);
    let queue = SendQueue::new(driver.ring(SendQueue::ENTRY_SIZE), max_sge, max_inline);
    (driver, queue)
}

fn element(length: u32) -> Sge {
    Sge {
        addr: 0x1000 + u64::from(length),
        length,
        lkey: 0x55aa_0000 + length % 0x1000,
    }
}

/// Length, number of elements and what lies behind the fixed part.
fn data(driver: &Driver, slot: u32) -> (u64, u64, Vec<u8>) {
    let entry = driver.entry(slot);
    let length = layout::read(&entry, DMA_LENGTH);
    assert_eq!(layout::read(&entry, DMA_RESID), length);
    assert_eq!(layout::read(&entry, DMA_CUR_SGE), 0);
    assert_eq!(layout::read(&entry, DMA_SGE_OFFSET), 0);
    let num_sge = layout::read(&entry, DMA_NUM_SGE);
    (length, num_sge, entry[DATA..].to_vec())
}

/// What lies behind the fixed part.
fn tail(driver: &Driver) -> Vec<u8> {
    driver.entry(0)[DATA..].to_vec()
}

fn padded(bytes: &[u8]) -> Vec<u8> {
    let mut padded = bytes.to_vec();
    padded.resize(512 - DATA, STALE);
    padded
}

#[test]
fn lists_of_every_length() {
    for count in 0..=MAX_SGE {
        let (driver, mut queue) = queue();
        let list: Vec<Sge> = (1..=count).map(element).collect();
        let total: u32 = (1..=count).sum();
        let mut wqe = queue.open(1, Opcode::SEND, SendFlags::empty()).unwrap();
        assert_eq!(wqe.sge_list(&list), Ok(total));
        assert_eq!(
            data(&driver, 0),
            (total.into(), count.into(), padded(&layout::sges(&list)))
        );
    }
}

#[test]
fn elements_of_no_bytes_stay_in_a_list_and_a_single_one_is_left_out() {
    let (driver, mut queue) = queue();
    let mut wqe = queue.open(1, Opcode::SEND, SendFlags::empty()).unwrap();
    let list = [element(0), element(5), element(0)];
    assert_eq!(wqe.sge_list(&list), Ok(5));
    assert_eq!(data(&driver, 0), (5, 3, padded(&layout::sges(&list))));
    assert_eq!(wqe.sge(element(0)), Ok(0));
    let (length, num_sge, _) = data(&driver, 0);
    assert_eq!((length, num_sge), (0, 0));
}

#[test]
fn one_element_more_is_refused() {
    let (driver, mut queue) = queue();
    let before = driver.entry(1);
    let list = vec![element(1); MAX_SGE as usize + 1];
    let mut wqe = queue.open(1, Opcode::SEND, SendFlags::empty()).unwrap();
    assert_eq!(wqe.max_sge(), MAX_SGE);
    assert_eq!(wqe.sge_list(&list), Err(PostError::TooManySges));
    assert_eq!(tail(&driver), padded(&[]), "nothing of it was copied");
    assert_eq!(driver.entry(1), before);
    assert_eq!(PostError::TooManySges.errno(), libc::EINVAL);
}

#[test]
fn limits_are_cut_to_the_entry() {
    // 512 bytes, 208 of them fixed: 304 bytes, or 19 elements.
    let (driver, mut queue) = queue_with(u32::MAX, u32::MAX);
    assert_eq!(queue.max_sge(), 19);
    let list: Vec<Sge> = (0..19).map(element).collect();
    let mut wqe = queue.open(1, Opcode::SEND, SendFlags::empty()).unwrap();
    assert!(wqe.sge_list(&list).is_ok());
    assert_eq!(data(&driver, 0).2, layout::sges(&list));
    assert_eq!(wqe.sge_list(&[element(0); 20]), Err(PostError::TooManySges));
    assert_eq!(wqe.inline(&[7; 304]), Ok(304));
    assert_eq!(data(&driver, 0), (304, 0, vec![7; 304]));
    assert_eq!(wqe.inline(&[7; 305]), Err(PostError::InlineTooLong));
    assert_eq!(driver.entry(1), vec![STALE; 512]);
}

/// For a device that counts in 31 bits.
#[test]
fn two_gib_are_too_many_where_they_are() {
    let (driver, queue) = queue();
    let mut queue = queue.without_longest();
    let mut wqe = queue.open(1, Opcode::SEND, SendFlags::empty()).unwrap();
    let refused = Err(PostError::MessageTooLong);
    assert_eq!(wqe.sge(element(MAX_MESSAGE)), refused);
    assert_eq!(wqe.sge_list(&[element(MAX_MESSAGE)]), refused);
    assert_eq!(
        wqe.sge_list(&[element(MAX_MESSAGE - 1), element(1)]),
        refused
    );
    assert_eq!(wqe.sge(element(MAX_MESSAGE - 1)), Ok(MAX_MESSAGE - 1));
    assert_eq!(data(&driver, 0).0, u64::from(MAX_MESSAGE) - 1);
}

#[test]
fn two_gib_and_not_a_byte_more() {
    let fits = [
        vec![element(MAX_MESSAGE)],
        vec![element(MAX_MESSAGE - 1), element(1)],
        vec![element(0), element(MAX_MESSAGE), element(0)],
    ];
    let too_long = [
        vec![element(MAX_MESSAGE + 1)],
        vec![element(u32::MAX)],
        vec![element(MAX_MESSAGE), element(1)],
        // Sums that wrap in 32 bits.
        vec![element(u32::MAX), element(1)],
        vec![element(u32::MAX); MAX_SGE as usize],
    ];
    assert_eq!(u64::from(MAX_MESSAGE), 2 << 30);
    for list in fits {
        let (driver, mut queue) = queue();
        let mut wqe = queue.open(1, Opcode::SEND, SendFlags::empty()).unwrap();
        assert_eq!(wqe.sge_list(&list), Ok(MAX_MESSAGE));
        assert_eq!(data(&driver, 0).0, 2 << 30);
    }
    for list in too_long {
        let (_driver, mut queue) = queue();
        let mut wqe = queue.open(1, Opcode::SEND, SendFlags::empty()).unwrap();
        assert_eq!(wqe.sge_list(&list), Err(PostError::MessageTooLong));
        if let [sge] = list[..] {
            assert_eq!(wqe.sge(sge), Err(PostError::MessageTooLong));
        }
    }
    assert_eq!(PostError::MessageTooLong.errno(), libc::EINVAL);
}

/// A send for the quick way.
struct Send(Sge, SendFlags);

impl OneElement for Send {
    fn wr_id(&self) -> u64 {
        1
    }
    fn opcode(&self) -> Opcode {
        Opcode::SEND
    }
    fn flags(&self) -> SendFlags {
        self.1
    }
    fn immediate_or_key(&self) -> u32 {
        0
    }
    fn remote_addr(&self) -> u64 {
        0
    }
    fn rkey(&self) -> u32 {
        0
    }
    fn sge(&self) -> &Sge {
        &self.0
    }
}

#[test]
fn the_quick_way_leaves_the_longest_messages_to_the_general_one() {
    let (driver, mut queue) = queue();
    let mut writer = queue.begin();
    for length in [MAX_MESSAGE, MAX_MESSAGE + 1, u32::MAX] {
        assert!(!writer.push_one(&Send(element(length), SendFlags::empty())));
    }
    assert!(writer.push_one(&Send(element(MAX_MESSAGE - 1), SendFlags::empty())));
    let queue = writer.keep();
    // SAFETY: nobody reads the memory that the entry names.
    assert!(unsafe { queue.publish() });
    assert_eq!(driver.producer(), 1, "of four, one was taken");
    assert_eq!(data(&driver, 0).0, u64::from(MAX_MESSAGE - 1));
}

/// Bytes to be sent, none of them [`STALE`], no two neighbours the same.
fn bytes(length: usize) -> Vec<u8> {
    (0..length).map(|i| (i * 7 % 251) as u8).collect()
}

#[test]
fn inline_of_every_size_in_the_general_way() {
    for length in 0..=MAX_INLINE as usize {
        let bytes = bytes(length);
        let (driver, mut queue) = queue();
        let mut wqe = queue.open(1, Opcode::SEND, SendFlags::INLINE).unwrap();
        assert_eq!(wqe.inline(&bytes), Ok(length as u32));
        assert_eq!(data(&driver, 0), (length as u64, 0, padded(&bytes)));
    }
    let (driver, mut queue) = queue();
    let mut wqe = queue.open(1, Opcode::SEND, SendFlags::INLINE).unwrap();
    let long = bytes(MAX_INLINE as usize + 1);
    assert_eq!(wqe.inline(&long), Err(PostError::InlineTooLong));
    assert_eq!(tail(&driver), padded(&[]));
    assert_eq!(PostError::InlineTooLong.errno(), libc::EINVAL);
}

/// Posts `bytes` inline by the quick way; none if it was left to the general.
fn quick_inline(max_inline: u32, bytes: &[u8]) -> Option<Driver> {
    let (driver, mut queue) = queue_with(MAX_SGE, max_inline);
    let sge = Sge {
        addr: bytes.as_ptr().expose_provenance() as u64,
        length: bytes.len() as u32,
        lkey: 0,
    };
    let mut writer = queue.begin();
    // SAFETY: the element is a slice's memory.
    let taken = unsafe { writer.push_one_inline(&Send(sge, SendFlags::INLINE)) };
    if !taken {
        let queue = writer.keep();
        // SAFETY: an empty batch.
        assert!(!unsafe { queue.publish() });
        assert_eq!(driver.producer(), 0);
        return None;
    }
    // SAFETY: inline data names no memory.
    unsafe { writer.publish() };
    assert_eq!(driver.producer(), 1);
    Some(driver)
}

#[test]
fn inline_of_every_size_in_the_quick_way() {
    let mut quick = 0;
    for length in 0..=MAX_INLINE as usize + 1 {
        let bytes = bytes(length);
        let Some(driver) = quick_inline(MAX_INLINE, &bytes) else {
            continue;
        };
        quick += 1;
        assert_eq!(data(&driver, 0), (length as u64, 0, padded(&bytes)));
        assert_eq!(layout::read(&driver.entry(0), SEND_FLAGS), 8);
        assert!(driver.untouched_but(&[0]));
    }
    assert!((33..=MAX_INLINE + 1).contains(&quick), "{quick} sizes");
}

#[test]
fn the_quick_way_keeps_to_a_small_limit() {
    for max_inline in [0, 1, 3, 17, 31] {
        for length in 0..=64 {
            let taken = quick_inline(max_inline, &bytes(length)).is_some();
            assert_eq!(taken, length <= max_inline as usize);
        }
    }
}

#[test]
fn inline_from_pieces() {
    let all = bytes(MAX_INLINE as usize);
    for cut in 0..=all.len() {
        let (driver, mut queue) = queue();
        let (one, two) = all.split_at(cut);
        let mut wqe = queue.open(1, Opcode::SEND, SendFlags::INLINE).unwrap();
        let pieces = [one, &[], two].map(|piece| (piece.as_ptr(), piece.len()));
        // SAFETY: slices' memory.
        let length = unsafe { wqe.inline_raw(pieces.into_iter()) };
        assert_eq!(length, Ok(MAX_INLINE));
        assert_eq!(
            data(&driver, 0),
            (MAX_INLINE.into(), 0, padded(&all)),
            "cut at {cut}"
        );
    }
}

#[test]
fn inline_pieces_beyond_the_limit_are_not_read() {
    let all = bytes(MAX_INLINE as usize);
    // A length that would wrap, at an address that must not be touched.
    for length in [1, usize::MAX, usize::MAX - MAX_INLINE as usize + 1] {
        let (driver, mut queue) = queue();
        let mut wqe = queue.open(1, Opcode::SEND, SendFlags::INLINE).unwrap();
        let pieces = [(all.as_ptr(), all.len()), (std::ptr::null(), length)];
        // SAFETY: the first is a slice; the second must not be read.
        let result = unsafe { wqe.inline_raw(pieces.into_iter()) };
        assert_eq!(result, Err(PostError::InlineTooLong));
        assert_eq!(tail(&driver), padded(&all), "not beyond the limit");
    }
}

#[test]
fn the_last_setter_of_data_counts() {
    let (driver, mut queue) = queue();
    let mut wqe = queue.open(1, Opcode::SEND, SendFlags::empty()).unwrap();
    wqe.sge_list(&[element(3), element(4)]).unwrap();
    wqe.inline(&[9; 5]).unwrap();
    let (length, num_sge, tail) = data(&driver, 0);
    assert_eq!((length, num_sge, &tail[..5]), (5, 0, &[9; 5][..]));
    wqe.sge(element(6)).unwrap();
    let (length, num_sge, _) = data(&driver, 0);
    assert_eq!((length, num_sge), (6, 1));
    wqe.no_data();
    let (length, num_sge, _) = data(&driver, 0);
    assert_eq!((length, num_sge), (0, 0));
}
