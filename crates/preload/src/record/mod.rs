//! A record of the program's verbs calls, posts and completions, as lines of JSON
//! ([docs/trace.md](../../../../docs/trace.md)): with `RINGVERBS_RECORD`, on embedded devices and
//! on those of the host.
//!
//! ```text
//! ioctl ── command ──┐
//! post ─── posts ────┼──► Recorder ── lines ──► file, or socket of `ringverbs trace`
//! poll ─── polls ────┤
//! device ─ device ───┘
//! ```
//!
//! The hooks of this module are called by those of the others, and call the provider: they see
//! what the provider gets and returns. Lines are written once 64 KiB are pending, after each
//! call, and when a poll finds nothing, which is before a program waits.

mod command;
mod device;
mod names;
mod polls;
mod posts;

use std::ffi::c_int;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, Once, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use uverbs::environment;

use crate::config::print_error;
use crate::explain::json::Object;
use crate::explain::lock;
use crate::switch::Switch;
use crate::{internal, real, table};
use command::Objects;
pub(crate) use command::{Call, closed};
pub(crate) use device::seen_by_device;
pub(crate) use polls::{hook_extended_queue, hook_polls, provider_of_poll};
pub(crate) use posts::{hook_builders, hook_posts, provider_of_builder, provider_of_post};

/// Names the file of the record, into whose name the process's number is inserted, or a socket to
/// connect to.
const RECORD: &str = "RINGVERBS_RECORD";
/// The extension of that socket.
const TRACE: &str = "trace";
/// Bytes of pending lines from which they are written.
const MAX_PENDING: usize = 64 << 10;

/// Whether there is a record.
static SWITCH: Switch = Switch::new();
/// The recorder of this process.
static CURRENT: AtomicPtr<Recorder> = AtomicPtr::new(ptr::null_mut());

/// Returns the path that the variable names.
fn path() -> Option<&'static Path> {
    static PATH: OnceLock<Option<PathBuf>> = OnceLock::new();
    let read = || {
        let value = environment::variable(RECORD)?;
        (!value.is_empty()).then(|| PathBuf::from(value))
    };
    PATH.get_or_init(read).as_deref()
}

/// Returns whether the program is recorded.
#[inline]
pub(crate) fn is_on() -> bool {
    SWITCH.is_on(|| path().is_some())
}

/// Returns the recorder; `None` without a record, and in a signal handler, which may have
/// interrupted any code: what it does is counted only.
fn current() -> Option<&'static Recorder> {
    if !is_on() {
        return None;
    }
    let current = CURRENT.load(Ordering::Acquire);
    // SAFETY: recorders are never freed once they are current.
    let current = unsafe { current.as_ref() };
    if internal::is_in_handler() || internal::is_interrupted() {
        if let Some(recorder) = current {
            recorder.missed.fetch_add(1, Ordering::Relaxed);
        }
        return None;
    }
    Some(current.unwrap_or_else(start))
}

fn start() -> &'static Recorder {
    static FORKS: Once = Once::new();
    FORKS.call_once(|| {
        // SAFETY: the handlers may be called in any process, and exist until it ends.
        unsafe {
            libc::pthread_atfork(None, None, Some(after_fork));
            libc::atexit(at_exit);
        }
    });
    let new = Recorder::default();
    lock(&new.output).start = now();
    let new = Box::into_raw(Box::new(new));
    let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
    match CURRENT.compare_exchange(ptr::null_mut(), new, success, failure) {
        // SAFETY: recorders are never freed once they are current.
        Ok(_) => unsafe { &*new },
        Err(other) => {
            // SAFETY: created above, and not current: another thread was first.
            drop(unsafe { Box::from_raw(new) });
            // SAFETY: recorders are never freed once they are current.
            unsafe { &*other }
        }
    }
}

/// Runs in a child of fork, which has a record of its own. The parent's is abandoned, since its
/// lock may be held.
extern "C" fn after_fork() {
    let former = CURRENT.swap(ptr::null_mut(), Ordering::Relaxed);
    // SAFETY: recorders are never freed once they are current.
    let Some(former) = (unsafe { former.as_ref() }) else {
        return;
    };
    let fd = former.fd.load(Ordering::Relaxed);
    // Others may have closed it already.
    if table::is_internal(fd) {
        table::clear(fd);
        // SAFETY: the descriptor is the parent's record, which is not used here.
        unsafe { real::close(fd) };
    }
}

extern "C" fn at_exit() {
    finish();
}

/// Writes pending lines, and how many events are missing, at the end of the process.
pub(crate) fn finish() {
    // SAFETY: recorders are never freed once they are current.
    let Some(recorder) = (unsafe { CURRENT.load(Ordering::Acquire).as_ref() }) else {
        return;
    };
    if internal::is_internal() || internal::is_interrupted() {
        return;
    }
    let missed = recorder.missed.swap(0, Ordering::Relaxed);
    match missed {
        0 => recorder.flush(),
        missed => {
            let line = Object::new().text("type", "missed").raw("count", missed);
            recorder.append(&[line.end()], true);
        }
    }
}

/// Returns the time in nanoseconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as u64)
}

/// Where lines go.
#[derive(Debug)]
enum Target {
    /// The file of this process, and its path.
    File(File, PathBuf),
    Stream(UnixStream),
}

impl Target {
    /// Creates the file of this process, or connects to a socket.
    fn open(path: &Path) -> io::Result<Self> {
        let is_socket = path.metadata().is_ok_and(|it| it.file_type().is_socket());
        if is_socket {
            return UnixStream::connect(path).map(Self::Stream);
        }
        // A FIFO that nobody reads is an error.
        let mut options = OpenOptions::new();
        options.mode(0o600).custom_flags(libc::O_NONBLOCK);
        let file = options.write(true).create(true).truncate(true);
        let path = embedded::process_path(path);
        file.open(&path).map(|file| Self::File(file, path))
    }

    fn as_raw_fd(&self) -> c_int {
        match self {
            Self::File(file, _) => file.as_raw_fd(),
            Self::Stream(stream) => stream.as_raw_fd(),
        }
    }

    /// Writes lines. If that fails, a file ends with the last whole line that has room, after the
    /// `written` bytes before them.
    fn write(&mut self, lines: &[u8], written: u64) -> io::Result<()> {
        match self {
            Self::File(file, _) => {
                let mut done = 0;
                let result = write_counted(file, lines, written, &mut done);
                if result.is_err() {
                    let newline = lines[..done].iter().rposition(|byte| *byte == b'\n');
                    let whole = newline.map_or(0, |at| at as u64 + 1);
                    let _ = file.set_len(written + whole);
                }
                result
            }
            Self::Stream(stream) => send_all(stream, lines),
        }
    }
}

/// Returns whether a path cannot be opened since `ringverbs trace`, which has made it, has ended.
fn is_end_of_trace(path: &Path, error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, NotFound};
    let is_gone = [NotFound, ConnectionRefused].contains(&error.kind());
    is_gone && path.extension().is_some_and(|it| it == TRACE)
}

/// Sends bytes, without SIGPIPE if nobody receives them.
fn send_all(stream: &UnixStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let (fd, flags) = (stream.as_raw_fd(), libc::MSG_NOSIGNAL);
        // SAFETY: the bytes are readable for their length.
        let sent = unsafe { libc::send(fd, bytes.as_ptr().cast(), bytes.len(), flags) };
        match usize::try_from(sent) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    }
    Ok(())
}

/// Writes bytes to a file of `length` bytes, and counts them.
fn write_counted(file: &mut File, bytes: &[u8], length: u64, done: &mut usize) -> io::Result<()> {
    while *done < bytes.len() {
        let room = room_after(length + *done as u64)?;
        let end = (*done).saturating_add(room).min(bytes.len());
        match file.write(&bytes[*done..end]) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => *done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Returns how much longer a file of `length` bytes may be.
fn room_after(length: u64) -> io::Result<usize> {
    match embedded::file_size_limit().saturating_sub(length) {
        0 => Err(io::Error::from_raw_os_error(libc::EFBIG)),
        room => Ok(usize::try_from(room).unwrap_or(usize::MAX)),
    }
}

/// What is written, under the recorder's lock.
#[derive(Debug, Default)]
struct Output {
    /// `None` before the first line, and after a failure.
    target: Option<Target>,
    is_open: bool,
    /// When the record began.
    start: u64,
    pending: Vec<u8>,
    /// Number of bytes that were written.
    written: u64,
}

impl Output {
    /// Opens the target, and writes the first line. A program that cannot be recorded ends: it
    /// must not run unobserved. One that outlives `ringverbs trace` goes on.
    fn open(&mut self) {
        self.is_open = true;
        let Some(path) = path() else { return };
        match Target::open(path) {
            Ok(target) => self.target = Some(target),
            Err(error) if is_end_of_trace(path, &error) => {
                return print_error("the trace has ended: calls are not listed");
            }
            Err(error) => {
                print_error(&format!("{}: {error}", path.display()));
                // SAFETY: a call without pointers, which ends the process.
                unsafe { real::_exit(1) };
            }
        }
        let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let line = Object::new()
            .text("type", "record")
            .raw("version", 1)
            .raw("process", std::process::id())
            .text("program", name.trim_end())
            .text("host", host.trim_end())
            .raw("start", self.start);
        self.push(&line.end());
    }

    fn push(&mut self, line: &str) {
        self.pending.extend_from_slice(line.as_bytes());
        self.pending.push(b'\n');
    }

    fn write(&mut self) {
        let lines = std::mem::take(&mut self.pending);
        let Some(target) = &mut self.target else {
            return;
        };
        match target.write(&lines, self.written) {
            Ok(()) => self.written += lines.len() as u64,
            Err(error) => {
                let path = match target {
                    Target::File(_, path) => path,
                    Target::Stream(_) => path().unwrap_or(Path::new("")),
                };
                print_error(&format!(
                    "{}: the record ends here: {error}",
                    path.display()
                ));
                self.target = None;
            }
        }
        // The allocation is kept for the next lines.
        self.pending = lines;
        self.pending.clear();
    }
}

/// Writes the record of a process.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    output: Mutex<Output>,
    objects: Mutex<Objects>,
    hooked: Mutex<device::Hooked>,
    /// Lines are pending.
    has_pending: AtomicBool,
    /// The target's descriptor, for a child of fork.
    fd: AtomicI32,
    /// Number of posts and completions in signal handlers.
    missed: AtomicU64,
}

impl Recorder {
    /// Adds lines, and writes them if `at_once`, or if many are pending.
    fn append(&self, lines: &[String], at_once: bool) {
        let _scope = internal::enter();
        let mut output = lock(&self.output);
        if !output.is_open {
            output.open();
            let fd = output.target.as_ref().map_or(-1, Target::as_raw_fd);
            self.fd.store(fd, Ordering::Relaxed);
        }
        if output.target.is_none() {
            return;
        }
        lines.iter().for_each(|line| output.push(line));
        let writes = at_once || output.pending.len() >= MAX_PENDING;
        if writes {
            output.write();
        }
        self.has_pending.store(!writes, Ordering::Relaxed);
    }

    /// Writes pending lines.
    fn flush(&self) {
        if self.has_pending.load(Ordering::Relaxed) {
            self.append(&[], true);
        }
    }
}
