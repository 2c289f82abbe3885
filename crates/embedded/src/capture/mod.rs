//! Captures of the frames that the devices of a process send and receive, as pcapng files.
//!
//! ```text
//! Hca ── FrameObserver ──► DeviceFrames ─┐
//! wires ── management datagrams ─────────┴─► Recorder ── blocks ──► Files
//! ```
//!
//! Frames are written when a device has no more of them for now, so that a killed process leaves
//! them in the file. Whoever writes has the device's lock: a slow disk delays the device.

mod files;
mod options;

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use roce::packet::{LinkKind, Packet, View};
use roce::pcap::{self, Direction, Record};
use softhca::cause::{Cause, FrameDrop};
use softhca::observed_frame::{FrameObserver, ObservedFrame};

use crate::program_name;
use files::Files;
pub use options::{CaptureOptionError, CaptureOptions, CaptureRing, CaptureSnap};

/// Returns the path of this process's file, if several processes are given the same path: the
/// process's number precedes the extension, as in `frames-4711.pcapng`.
pub fn process_path(path: &Path) -> PathBuf {
    files::path_of(path, None)
}

/// Number of bytes that are written at once at the latest.
const MAX_BUFFER: usize = 64 << 10;
/// The application that files name.
const APPLICATION: &str = concat!("ringverbs ", env!("CARGO_PKG_VERSION"));

/// Offsets in a management datagram: the attribute, the body, the id of a requested service.
const ATTRIBUTE: usize = 16;
const BODY: usize = 24;
const SERVICE: usize = BODY + 8;
/// The management class of the connection manager.
const CONNECTION_MANAGEMENT: u8 = 7;

/// Called with the file of a capture and the error that has ended it.
pub type CaptureEnd = Box<dyn Fn(&Path, &io::Error) + Send>;

/// The time of a capture.
pub(crate) enum CaptureClock {
    /// That of the system.
    Host,
    /// Nanoseconds of simulated time, from 1 on.
    Simulated(Arc<AtomicU64>),
}

impl CaptureClock {
    fn now(&self) -> u64 {
        match self {
            Self::Host => {
                let time = SystemTime::now().duration_since(UNIX_EPOCH);
                time.map_or(0, |it| u64::try_from(it.as_nanos()).unwrap_or(u64::MAX))
            }
            Self::Simulated(now) => now.load(Ordering::Acquire).saturating_sub(1),
        }
    }
}

/// The files of a capture while it lasts, and the blocks for them.
struct Output {
    files: Files,
    blocks: Vec<u8>,
    /// The interfaces of the current file: device and kind of link.
    interfaces: Vec<(usize, LinkKind)>,
    on_end: Option<CaptureEnd>,
}

/// Records the frames of a process.
pub(crate) struct Recorder {
    /// `None` once it has ended.
    output: Mutex<Option<Output>>,
    /// Number of frames that were recorded.
    frames: AtomicU64,
    snap: CaptureSnap,
    names: Vec<String>,
    clock: CaptureClock,
    /// Describes the process, at the beginning of comments.
    process: String,
}

impl Recorder {
    /// Creates the first file.
    pub(crate) fn create(
        options: &CaptureOptions,
        clock: CaptureClock,
        on_end: Option<CaptureEnd>,
    ) -> io::Result<Arc<Self>> {
        let mut output = Output {
            files: Files::create(&options.path, options.ring)?,
            blocks: Vec::with_capacity(2 * MAX_BUFFER),
            interfaces: Vec::new(),
            on_end,
        };
        pcap::section(&mut output.blocks, APPLICATION);
        if let Err(error) = output.write() {
            let _ = fs::remove_file(output.files.path());
            return Err(error);
        }
        Ok(Arc::new(Self {
            output: Mutex::new(Some(output)),
            frames: AtomicU64::new(0),
            snap: options.snap,
            names: options.names.clone(),
            clock,
            process: format!("process {} ({})", std::process::id(), program_name()),
        }))
    }

    fn output(&self) -> MutexGuard<'_, Option<Output>> {
        self.output.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the capture. Returns the path of its last file; `None` if it has ended before.
    pub(crate) fn end(&self) -> Option<PathBuf> {
        self.flush();
        let output = self.output().take()?;
        Some(output.files.path().to_owned())
    }

    /// Returns whether it has ended, also by an error.
    pub(crate) fn has_ended(&self) -> bool {
        self.output().is_none()
    }

    /// Returns the number of frames that were recorded.
    pub(crate) fn frames(&self) -> u64 {
        self.frames.load(Ordering::Relaxed)
    }

    /// Returns the number of bytes after which zeros take the place of the frame's own: also of
    /// the ICRC, from which a short payload could be computed.
    fn shown(&self, kind: LinkKind, frame: &[u8]) -> usize {
        if self.snap != CaptureSnap::Headers {
            return usize::MAX;
        }
        let management = View::read_unchecked(kind, frame).ok();
        let management = management.filter(|view| view.bth.dest_qpn == 1);
        let management = management.map_or(0, |view| management_headers(view.payload.bytes()));
        pcap::headers_length(kind, frame) + management
    }

    /// Returns the name of a device.
    fn name(&self, device: usize) -> String {
        let given = self.names.get(device).cloned();
        given.unwrap_or_else(|| format!("mlx5_{device}"))
    }

    /// Records a frame of a device.
    fn record(&self, device: usize, frame: &ObservedFrame<'_>) {
        let mut guard = self.output();
        let Some(output) = guard.as_mut() else { return };
        self.frames.fetch_add(1, Ordering::Relaxed);
        let recorded = self.append(output, device, frame);
        self.end_if_failed(&mut guard, recorded);
    }

    fn append(
        &self,
        output: &mut Output,
        device: usize,
        frame: &ObservedFrame<'_>,
    ) -> io::Result<()> {
        if output.files.is_full(output.blocks.len()) {
            output.write()?;
            output.files.next()?;
            output.interfaces.clear();
            pcap::section(&mut output.blocks, APPLICATION);
        }
        let (kind, bytes) = (frame.packet.kind(), frame.packet.frame());
        let interface = output.interface(device, kind, || self.name(device));
        // Read with the lock held, so that the times of a file ascend.
        let time = self.clock.now();
        Record {
            interface,
            time,
            kind,
            frame: bytes,
            snap: match self.snap {
                CaptureSnap::Bytes(bytes) => bytes,
                CaptureSnap::Headers | CaptureSnap::All => usize::MAX,
            },
            shown: self.shown(kind, bytes),
            direction: Some(frame.direction),
            comment: &self.comment(device, frame),
        }
        .append(&mut output.blocks);
        match output.blocks.len() {
            MAX_BUFFER.. => output.write(),
            _ => Ok(()),
        }
    }

    /// Describes process and queue, and why the frame was dropped or refused.
    fn comment(&self, device: usize, frame: &ObservedFrame<'_>) -> String {
        let mut comment = self.process.clone();
        // Writing to a string does not fail.
        let _ = write!(comment, ", {}", self.name(device));
        if let Some(queue) = frame.queue {
            let _ = write!(comment, " queue pair {queue:#x}");
        }
        let mut access = None;
        for cause in frame.causes {
            let _ = match cause {
                Cause::Access(error) => {
                    access = Some(error);
                    Ok(())
                }
                Cause::Transport { cause, .. } => match access.take() {
                    Some(access) => write!(comment, "; {cause} ({access})"),
                    None => write!(comment, "; {cause}"),
                },
                Cause::Frame { cause, .. } => write!(comment, "; frame dropped: {cause}"),
                _ => Ok(()),
            };
        }
        for line in frame.faults {
            let loses = |cause: &Cause| match cause {
                Cause::Frame { cause, .. } => *cause == FrameDrop::Injected(*line),
                _ => false,
            };
            if !frame.causes.iter().any(loses) {
                let _ = write!(comment, "; the injected fault of line {line}");
            }
        }
        comment
    }

    /// Records a management datagram that a wire sends or receives for the connection manager.
    pub(crate) fn record_management(&self, packet: &Packet, direction: Direction) {
        self.record_of_wire(packet, direction, Some(1), None);
    }

    /// Records a datagram with a wrong ICRC, which no device sees.
    pub(crate) fn record_corrupted(&self, packet: &Packet) {
        let cause = Cause::Transport {
            qpn: None,
            cause: roce::transport::DropCause::Icrc.into(),
        };
        self.record_of_wire(packet, Direction::Inbound, None, Some(cause));
    }

    fn record_of_wire(
        &self,
        packet: &Packet,
        direction: Direction,
        queue: Option<u32>,
        cause: Option<Cause>,
    ) {
        let mut copy = packet.clone();
        copy.add_icrc();
        // Ids of the connection manager are those of the first device.
        self.record(
            0,
            &ObservedFrame {
                packet: &copy,
                direction,
                queue,
                causes: cause.as_slice(),
                faults: &[],
            },
        );
        self.flush();
    }

    /// Writes the frames that were recorded.
    fn flush(&self) {
        let mut guard = self.output();
        let Some(output) = guard.as_mut() else { return };
        let written = output.write();
        self.end_if_failed(&mut guard, written);
    }

    fn end_if_failed(&self, output: &mut Option<Output>, result: io::Result<()>) {
        let Err(error) = result else { return };
        if let Some(ended) = output.take() {
            let path = ended.files.path();
            tracing::error!(path = %path.display(), %error, "capture ended");
            if let Some(on_end) = &ended.on_end {
                on_end(path, &error);
            }
        }
    }
}

impl Output {
    /// Returns the number of an interface in the current file.
    fn interface(&mut self, device: usize, kind: LinkKind, name: impl FnOnce() -> String) -> u32 {
        let wanted = (device, kind);
        let found = self.interfaces.iter().position(|it| *it == wanted);
        let number = found.unwrap_or_else(|| {
            pcap::interface(&mut self.blocks, kind, &name());
            self.interfaces.push(wanted);
            self.interfaces.len() - 1
        });
        number as u32
    }

    fn write(&mut self) -> io::Result<()> {
        if self.blocks.is_empty() {
            return Ok(());
        }
        let result = self.files.write(&self.blocks);
        self.blocks.clear();
        result
    }
}

/// Returns the length of the headers of a management datagram: private data of programs follow.
fn management_headers(datagram: &[u8]) -> usize {
    const REQUEST: [u8; 2] = [0, 0x10];
    const REPLY: [u8; 2] = [0, 0x13];
    /// Service ids of rdma_cm, whose private data begin with the IP addresses.
    const IP_SERVICE: [u8; 5] = [0, 0, 0, 0, 1];
    const IP_HEADER: usize = 36;
    if datagram.get(1) != Some(&CONNECTION_MANAGEMENT) {
        return BODY;
    }
    let has_ip = datagram.get(SERVICE..SERVICE + 5) == Some(&IP_SERVICE);
    match datagram.get(ATTRIBUTE..ATTRIBUTE + 2) {
        Some(id) if id == REQUEST => BODY + 140 + if has_ip { IP_HEADER } else { 0 },
        Some(id) if id == REPLY => BODY + 36,
        _ => BODY + 8,
    }
}

/// Records the frames of a device.
pub(crate) struct DeviceFrames {
    pub(crate) recorder: Arc<Recorder>,
    /// Number of the device in this process.
    pub(crate) device: usize,
}

impl FrameObserver for DeviceFrames {
    fn observe(&mut self, frame: &ObservedFrame<'_>) {
        self.recorder.record(self.device, frame);
    }

    fn flush(&mut self) {
        self.recorder.flush();
    }
}
