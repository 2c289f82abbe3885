//! Rings of frames in memory that two processes share.

use std::fs::File;
use std::io;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::frame_index::{FrameConsumer, FrameHeader, FrameProducer, ProtocolViolation};
use crate::{Mapping, copy};

/// Words of a ring, 1 MiB: words that are written again should have left the receiver's
/// second-level cache, since reading and writing what the other processor's cache holds is
/// several times slower than by the cache that both share.
const WORDS: u32 = 1 << 17;
const WORD: usize = size_of::<u64>();
/// Where the words begin.
const START: usize = 4096;
/// Bytes of the shared memory.
const SIZE: usize = START + WORDS as usize * WORD;
/// Maximum number of bytes of a frame.
const LONGEST: usize = 0xffff;

const _: () = assert!(size_of::<FrameHeader>() <= START);

/// linux/memfd.h
const MFD_NOEXEC_SEAL: libc::c_uint = 8;
/// Seals of the memory: no holder of the descriptor can make it smaller, so that no
/// access to the mapping fails.
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// The words of a ring. The other side may write to them at any time, so they are
/// accessed by atomics, and no value is read twice.
#[derive(Debug)]
struct Words(Mapping);

impl Words {
    fn map(fd: BorrowedFd<'_>) -> io::Result<Self> {
        Mapping::new(fd, 0, SIZE).map(Self)
    }

    fn header(&self) -> NonNull<FrameHeader> {
        self.0.as_ptr().cast()
    }

    /// Returns the words from a position on, which wraps, up to the end of the ring, and
    /// how many there are.
    fn from(&self, at: u32) -> (*mut u64, usize) {
        let at = (at % WORDS) as usize;
        // SAFETY: in the mapping, before its end.
        let first = unsafe { self.0.as_ptr().add(START + at * WORD) };
        (first.cast().as_ptr(), WORDS as usize - at)
    }

    fn store_word(&self, at: u32, word: u64) {
        let (to, _) = self.from(at);
        // SAFETY: a word of the mapping, aligned since a mapping begins a page.
        unsafe { AtomicU64::from_ptr(to) }.store(word, Ordering::Relaxed);
    }

    fn load_word(&self, at: u32) -> u64 {
        let (from, _) = self.from(at);
        // SAFETY: as in `store_word`.
        unsafe { AtomicU64::from_ptr(from) }.load(Ordering::Relaxed)
    }

    /// Stores bytes from a position on.
    fn store(&self, at: u32, bytes: &[u8]) {
        let (to, room) = self.from(at);
        let (first, second) = bytes.split_at(bytes.len().min(room * WORD));
        // SAFETY: no more words than there are; the second part begins the ring, and a
        // frame is shorter than that.
        unsafe {
            copy::store(to.cast(), first);
            copy::store(self.from(0).0.cast(), second);
        }
    }

    /// Loads bytes from a position on.
    fn load(&self, at: u32, bytes: &mut [u8]) {
        let (from, room) = self.from(at);
        let middle = bytes.len().min(room * WORD);
        let (first, second) = bytes.split_at_mut(middle);
        // SAFETY: as in `store`.
        unsafe {
            copy::load(from.cast(), first);
            copy::load(self.from(0).0.cast(), second);
        }
    }
}

/// Words of a frame of that many bytes, with the one before it: its length, and a tag.
fn words(length: usize) -> u32 {
    1 + length.div_ceil(WORD) as u32
}

/// The side of a ring that writes frames, and has created the memory.
#[derive(Debug)]
pub struct FrameSender {
    indices: FrameProducer,
    words: Words,
}

impl FrameSender {
    /// Creates a ring. The descriptor is for the receiver, in another process.
    ///
    /// # Errors
    /// Those of memfd_create(2), ftruncate(2), fcntl(2) and mmap(2); EFBIG if the limit on the
    /// size of files is below a ring's.
    pub fn create() -> io::Result<(Self, OwnedFd)> {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // Linux before 6.3 does not have the flag that some systems require.
        let file = memory(flags | MFD_NOEXEC_SEAL).or_else(|_| memory(flags))?;
        check_size_limit()?;
        file.set_len(SIZE as u64)?;
        // SAFETY: the call takes a descriptor and flags.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let words = Words::map(file.as_fd())?;
        // SAFETY: the header is at the start of the mapping, which is dropped after it.
        let indices = unsafe { FrameProducer::new(words.header(), WORDS) };
        Ok((Self { indices, words }, file.into()))
    }

    /// Writes and publishes a frame. Returns false if there is no room.
    ///
    /// # Errors
    /// [`ProtocolViolation`] if the receiver's index is impossible.
    pub fn push(&mut self, tag: u8, frame: &[u8]) -> Result<bool, ProtocolViolation> {
        let count = words(frame.len());
        if frame.len() > LONGEST {
            return Ok(false);
        }
        let Some(at) = self.indices.room(count)? else {
            return Ok(false);
        };
        let head = frame.len() as u64 | u64::from(tag) << 32;
        self.words.store_word(at, head);
        self.words.store(at.wrapping_add(1), frame);
        self.indices.publish(count);
        Ok(true)
    }

    /// Called after frames were pushed: returns whether the receiver must be woken.
    #[must_use]
    pub fn takes_wake_up(&self) -> bool {
        self.indices.takes_wake_up()
    }

    /// Returns whether the receiver has not read all frames.
    ///
    /// # Errors
    /// [`ProtocolViolation`] if its index is impossible.
    pub fn is_unread(&mut self) -> Result<bool, ProtocolViolation> {
        self.indices.is_unread()
    }
}

/// Checks the limit that ends the process (SIGXFSZ) if a file becomes longer.
fn check_size_limit() -> io::Result<()> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the limit is writable.
    if unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    if limit.rlim_cur < SIZE as u64 {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    Ok(())
}

fn memory(flags: libc::c_uint) -> io::Result<File> {
    // SAFETY: a name and flags.
    let fd = unsafe { libc::memfd_create(c"ringverbs-frames".as_ptr(), flags) };
    match fd {
        // SAFETY: the descriptor is new and owned by nothing else.
        0.. => Ok(unsafe { File::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The side of a ring that reads frames.
#[derive(Debug)]
pub struct FrameReceiver {
    indices: FrameConsumer,
    words: Words,
}

impl FrameReceiver {
    /// Maps the ring that another process has created.
    ///
    /// # Errors
    /// EINVAL if the descriptor is not of memory with the right size that stays as it
    /// is; those of mmap(2).
    pub fn new(fd: BorrowedFd<'_>) -> io::Result<Self> {
        check(fd)?;
        let words = Words::map(fd)?;
        // SAFETY: the header is at the start of the mapping, which is dropped after it.
        let indices = unsafe { FrameConsumer::new(words.header(), WORDS) };
        Ok(Self { indices, words })
    }

    /// Returns whether there is something to [`pop`](Self::pop), which may be an error.
    pub fn has_frames(&self) -> bool {
        self.indices
            .unread()
            .map_or(true, |(_, unread)| unread != 0)
    }

    /// Copies the next frame to the start of `to`. Returns its tag and length; `None` if
    /// there is no frame.
    ///
    /// # Errors
    /// [`ProtocolViolation`] if the sender's index or a length is impossible, or a frame is longer
    /// than `to`.
    pub fn pop(&mut self, to: &mut [u8]) -> Result<Option<(u8, usize)>, ProtocolViolation> {
        let (at, unread) = self.indices.unread()?;
        if unread == 0 {
            return Ok(None);
        }
        let head = self.words.load_word(at);
        let (length, tag) = ((head as u32) as usize, (head >> 32) as u8);
        if length > LONGEST || words(length) > unread {
            return Err(ProtocolViolation);
        }
        let to = to.get_mut(..length).ok_or(ProtocolViolation)?;
        self.words.load(at.wrapping_add(1), to);
        self.indices.release(words(length));
        Ok(Some((tag, length)))
    }

    /// Asks the sender for a wake-up. Returns whether there is something to read
    /// already.
    #[must_use]
    pub fn arm(&self) -> bool {
        self.indices.arm()
    }
}

/// Checks that accesses to a mapping of the file cannot fail: it has the size, nobody
/// can take it away, and its pages are ordinary ones (huge ones may be used up).
fn check(fd: BorrowedFd<'_>) -> io::Result<()> {
    let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
    // SAFETY: the call takes a descriptor.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
        return Err(invalid());
    }
    let mut system = MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the call writes a `statfs`.
    if unsafe { libc::fstatfs(fd.as_raw_fd(), system.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: written by the call, which succeeded.
    if unsafe { system.assume_init() }.f_type != libc::TMPFS_MAGIC {
        return Err(invalid());
    }
    // SAFETY: the descriptor is open for the length of this call and is not closed
    // through this File, which is never dropped.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd.as_raw_fd()) });
    match file.metadata()?.len() == SIZE as u64 {
        true => Ok(()),
        false => Err(invalid()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (FrameSender, FrameReceiver) {
        let (sender, fd) = FrameSender::create().unwrap();
        (sender, FrameReceiver::new(fd.as_fd()).unwrap())
    }

    fn frame(length: usize, seed: usize) -> Vec<u8> {
        (0..length).map(|at| (at * 7 + seed) as u8).collect()
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no memfd_create")]
    fn frames_of_all_lengths_arrive_across_the_end() {
        let (mut sender, mut receiver) = pair();
        let mut to = vec![0; LONGEST];
        for seed in 0..2000 {
            let length = (seed * 37) % 4400;
            assert_eq!(sender.push(seed as u8, &frame(length, seed)), Ok(true));
            assert_eq!(sender.is_unread(), Ok(true));
            assert_eq!(receiver.pop(&mut to), Ok(Some((seed as u8, length))));
            assert_eq!(to[..length], frame(length, seed), "{seed}");
            assert_eq!(receiver.pop(&mut to), Ok(None));
            assert_eq!(sender.is_unread(), Ok(false));
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no memfd_create")]
    fn a_full_ring_takes_frames_again_once_some_were_read() {
        let (mut sender, mut receiver) = pair();
        let mut to = vec![0; LONGEST];
        let (mut pushed, mut popped) = (0, 0);
        for _ in 0..5 {
            while sender.push(0, &frame(4000, pushed)) == Ok(true) {
                pushed += 1;
            }
            for _ in 0..popped + 3 {
                if receiver.pop(&mut to) == Ok(None) {
                    break;
                }
                assert_eq!(to[..4000], frame(4000, popped));
                popped += 1;
            }
        }
        assert!(pushed > 130 && popped > 20, "{pushed} {popped}");
        assert_eq!(sender.push(0, &vec![0; LONGEST + 1]), Ok(false));
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no memfd_create")]
    fn an_armed_ring_asks_for_one_wake_up() {
        let (mut sender, mut receiver) = pair();
        sender.push(0, &[1]).unwrap();
        assert!(!sender.takes_wake_up());
        assert!(receiver.arm());
        receiver.pop(&mut [0; 1]).unwrap();
        assert!(sender.takes_wake_up() && !sender.takes_wake_up());
        assert!(!receiver.arm());
        sender.push(0, &[1]).unwrap();
        sender.push(0, &[1]).unwrap();
        assert!(sender.takes_wake_up() && !sender.takes_wake_up());
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no memfd_create")]
    fn memory_that_may_vanish_is_refused() {
        let seal = |file: &File, seals: libc::c_int| {
            // SAFETY: the call takes a descriptor and flags.
            unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) };
        };
        let made = |flags, size, seals: libc::c_int| {
            let file = memory(flags)?;
            file.set_len(size)?;
            seal(&file, seals);
            FrameReceiver::new(file.as_fd())
        };
        let size = SIZE as u64;
        let usual = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        assert!(made(usual, size, SEALS).is_ok());
        assert!(made(usual, size, libc::F_SEAL_GROW).is_err());
        assert!(made(usual, size + 4096, SEALS).is_err());
        assert!(made(usual, size - 4096, SEALS).is_err());
        assert!(made(usual, size, SEALS | libc::F_SEAL_WRITE).is_err());
        // There may be no huge pages, but a file of them is not mapped at all.
        assert!(made(usual | libc::MFD_HUGETLB, 2 << 20, SEALS).is_err());
        let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(FrameReceiver::new(socket.as_fd()).is_err());
        let (sender, fd) = FrameSender::create().unwrap();
        assert!(File::from(fd).set_len(0).is_err());
        drop(sender);
    }
}
