//! The data of a send work request: scatter lists, inline copies, limits.

use device_testing::rxe::{Driver, UNWRITTEN, layout, layout::send::*};
use ringverbs_rxe::{Data, MAX_MESSAGE, Opcode, PostError, SendFlags, SendQueue, SendWr, Sge};

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
    padded.resize(512 - DATA, UNWRITTEN);
    padded
}

/// Pushes a send of this data.
fn send(queue: &mut SendQueue, data: Data<'_>) -> Result<(), PostError> {
    let wr = SendWr {
        data,
        ..SendWr::new(1, Opcode::SEND, SendFlags::empty())
    };
    // SAFETY: inline data is readable, or refused.
    unsafe { queue.push(&wr) }
}

/// Pieces of inline data.
fn pieces<const N: usize>(pieces: [&[u8]; N]) -> [Sge; N] {
    pieces.map(|piece| Sge {
        addr: piece.as_ptr().expose_provenance() as u64,
        length: piece.len() as u32,
        lkey: 0x55,
    })
}

#[test]
fn lists_of_every_length() {
    for count in 0..=MAX_SGE {
        let (driver, mut queue) = queue();
        let list: Vec<Sge> = (1..=count).map(element).collect();
        let total: u32 = (1..=count).sum();
        assert_eq!(send(&mut queue, Data::Sges(&list)), Ok(()));
        assert_eq!(
            data(&driver, 0),
            (total.into(), count.into(), padded(&layout::sges(&list)))
        );
    }
}

#[test]
fn elements_of_no_bytes_stay_in_a_list() {
    for list in [
        &[element(0), element(5), element(0)][..],
        &[element(0)],
        &[element(0), element(0)],
    ] {
        let (driver, mut queue) = queue();
        let length = list.iter().map(|sge| u64::from(sge.length)).sum();
        assert_eq!(send(&mut queue, Data::Sges(list)), Ok(()));
        let expected = (length, list.len() as u64, padded(&layout::sges(list)));
        assert_eq!(data(&driver, 0), expected);
    }
}

#[test]
fn one_element_more_is_refused() {
    let (driver, mut queue) = queue();
    let before = driver.entry(1);
    let list = vec![element(1); MAX_SGE as usize + 1];
    assert_eq!(queue.max_sge(), MAX_SGE);
    let sent = send(&mut queue, Data::Sges(&list));
    assert_eq!(sent, Err(PostError::TooManySges));
    assert_eq!(tail(&driver), padded(&[]), "nothing of it was copied");
    assert_eq!(driver.entry(1), before);
    assert_eq!(PostError::TooManySges.errno(), libc::EINVAL);
}

#[test]
fn limits_are_cut_to_the_entry() {
    // 512 bytes, 208 of them fixed: 304 bytes, or 19 elements.
    let new = || queue_with(u32::MAX, u32::MAX);
    let (driver, mut queue) = new();
    assert_eq!(queue.max_sge(), 19);
    let list: Vec<Sge> = (0..20).map(element).collect();
    assert_eq!(send(&mut queue, Data::Sges(&list[..19])), Ok(()));
    assert_eq!(data(&driver, 0).2, layout::sges(&list[..19]));
    assert_eq!(driver.entry(1), vec![UNWRITTEN; 512]);
    let (driver, mut queue) = new();
    let long = [7; 305];
    let sent = send(&mut queue, Data::Inline(&pieces([&long[..304]])));
    assert_eq!(sent, Ok(()));
    assert_eq!(data(&driver, 0), (304, 0, vec![7; 304]));
    assert_eq!(driver.entry(1), vec![UNWRITTEN; 512]);
    let (driver, mut queue) = new();
    let sent = send(&mut queue, Data::Sges(&list));
    assert_eq!(sent, Err(PostError::TooManySges));
    let sent = send(&mut queue, Data::Inline(&pieces([&long])));
    assert_eq!(sent, Err(PostError::InlineTooLong));
    assert_eq!(driver.entry(1), vec![UNWRITTEN; 512]);
}

#[test]
fn message_limit_is_two_gib() {
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
        assert_eq!(send(&mut queue, Data::Sges(&list)), Ok(()));
        assert_eq!(data(&driver, 0).0, 2 << 30);
    }
    for list in too_long {
        let (_driver, mut queue) = queue();
        let sent = send(&mut queue, Data::Sges(&list));
        assert_eq!(sent, Err(PostError::MessageTooLong));
    }
    assert_eq!(PostError::MessageTooLong.errno(), libc::EINVAL);
}

/// Bytes to be sent, none of them [`UNWRITTEN`], no two neighbours the same.
fn bytes(length: usize) -> Vec<u8> {
    (0..length).map(|i| (i * 7 % 251) as u8).collect()
}

#[test]
fn inline_of_every_size() {
    for max_inline in [0, 1, 3, 17, 31, 63, 64, 65, MAX_INLINE] {
        for length in 0..=MAX_INLINE as usize + 1 {
            let bytes = bytes(length);
            let (one, two) = bytes.split_at(length / 3);
            // One piece, which is copied without a call if it is short, and more.
            for list in [&pieces([&bytes])[..], &pieces([one, two])] {
                let (driver, mut queue) = queue_with(MAX_SGE, max_inline);
                let sent = send(&mut queue, Data::Inline(list));
                if length > max_inline as usize {
                    assert_eq!(sent, Err(PostError::InlineTooLong));
                    assert!(
                        tail(&driver)[max_inline as usize..]
                            .iter()
                            .all(|&b| b == UNWRITTEN)
                    );
                    continue;
                }
                assert_eq!(sent, Ok(()));
                assert_eq!(data(&driver, 0), (length as u64, 0, padded(&bytes)));
                assert_eq!(layout::read(&driver.entry(0), SEND_FLAGS), 8);
                assert!(driver.unwritten_except(&[0]));
            }
        }
    }
    assert_eq!(PostError::InlineTooLong.errno(), libc::EINVAL);
}

#[test]
fn inline_from_pieces() {
    let all = bytes(MAX_INLINE as usize);
    for cut in 0..=all.len() {
        let (driver, mut queue) = queue();
        let (one, two) = all.split_at(cut);
        let sent = send(&mut queue, Data::Inline(&pieces([one, &[], two])));
        assert_eq!(sent, Ok(()));
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
    // Lengths that would wrap, at an address that must not be touched.
    for length in [1, u32::MAX, u32::MAX - MAX_INLINE + 1] {
        let (driver, mut queue) = queue();
        let [first] = pieces([&all]);
        let second = Sge {
            addr: 8,
            length,
            lkey: 0,
        };
        let sent = send(&mut queue, Data::Inline(&[first, second]));
        assert_eq!(sent, Err(PostError::InlineTooLong));
        assert_eq!(tail(&driver), padded(&all), "not beyond the limit");
    }
}
