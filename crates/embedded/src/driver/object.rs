//! Objects of the contexts, by handle.

use std::any::Any;
use std::collections::{BTreeSet, HashMap};
use std::fmt::Debug;
use std::ops::Range;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use ring::Mapping;
use softhca::command::opcode as op;
use softhca::rule::Rule;
use uverbs::abi::write::{DestroyQpResp, ModifyQp};
use uverbs::{AccessFlags, QpType};

use crate::addresses::PacketAccess;
use crate::driver::cause::{Class, Result, invalid, is, refuse};
use crate::driver::data::{Counters, Packet, Target, WorkQueue};
use crate::driver::descriptors::ObjectChange;
use crate::driver::event::{EventCounter, EventFile};
use crate::driver::request::Request;
use crate::driver::state::State;

/// Memory that the device may access for an object: address and length.
pub(crate) type MemoryRange = (u64, u64);

/// Destination of an object's asynchronous events, and the number of them that
/// were read.
#[derive(Debug, Default)]
pub(crate) struct Events {
    /// Identifies the object in events.
    pub(crate) user_handle: u64,
    /// `None`: the context's first event file.
    pub(crate) file: Option<Arc<EventFile>>,
    pub(crate) reported: EventCounter,
}

impl Events {
    /// Answers the command that has destroyed the object.
    pub(crate) fn report(&self, request: &mut Request, id: u16) {
        let counts = DestroyQpResp {
            events_reported: self.reported.load(Ordering::Relaxed),
        };
        request.answer(id, &counts);
    }
}

/// A completion queue.
#[derive(Debug)]
pub(crate) struct Cq {
    pub(crate) number: u32,
    /// Number of entries.
    pub(crate) cqe: u32,
    /// Bytes of a CQE.
    pub(crate) entry: u32,
    /// CQE size as the device encodes it: 128 bytes can also mean a padded
    /// 64-byte CQE.
    pub(crate) entry_size: u32,
    /// Completions carry the wall clock time, which queue pairs here do not support.
    pub(crate) real_time: bool,
    pub(crate) ignores_overrun: bool,
    pub(crate) channel: Option<Arc<EventFile>>,
    pub(crate) completions: EventCounter,
    pub(crate) events: Events,
}

/// A queue pair.
#[derive(Debug)]
pub(crate) struct Qp {
    pub(crate) number: u32,
    pub(crate) kind: u32,
    pub(crate) cap: [u32; 5],
    pub(crate) signal_all: bool,
    /// 64-byte blocks of its send queue; a work request has one or more.
    pub(crate) send_blocks: u32,
    /// The context's register that it uses; `None` for an XRC target.
    pub(crate) register: Option<u32>,
    /// Handle of its shared receive queue.
    pub(crate) shared_queue: Option<u32>,
    /// User handle of the completion queue of its receives, unless it is a DC target, or its
    /// shared receive queue has one.
    pub(crate) receive_queue: Option<u64>,
    /// For an XRC target: the device's number of its XRC domain.
    pub(crate) domain: Option<u32>,
    /// For a DC target: its attributes.
    pub(crate) target: Option<Target>,
    /// For a raw packet queue pair: its device objects.
    pub(crate) packet: Option<Packet>,
    /// For a raw packet queue pair of a device on an interface: the interface's frames.
    pub(crate) _access: Option<Arc<dyn PacketAccess>>,
    /// Receives are consumed in any order.
    pub(crate) out_of_order: bool,
    /// Attributes as last set; the device stores the state.
    pub(crate) attributes: ModifyQp,
    /// The multicast groups that it has joined.
    pub(crate) groups: Vec<[u8; 16]>,
    pub(crate) events: Events,
}

impl Qp {
    /// Creates a queue pair that has no queues of its own.
    pub(crate) fn without_queues(number: u32, kind: QpType, events: Events) -> Self {
        Self {
            number,
            kind: kind.0,
            cap: [0; 5],
            signal_all: false,
            send_blocks: 0,
            register: None,
            shared_queue: None,
            receive_queue: None,
            domain: None,
            target: None,
            packet: None,
            _access: None,
            out_of_order: false,
            attributes: ModifyQp::default(),
            groups: Vec::new(),
            events,
        }
    }
}

/// The device's object of a shared receive queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SrqKind {
    /// A pool of receives (RMP).
    Basic,
    /// An XRC SRQ.
    Xrc,
    /// An XRQ with tag matching.
    Tags,
}

impl SrqKind {
    /// Returns the command that creates it.
    pub(crate) fn create_opcode(self) -> u16 {
        match self {
            SrqKind::Basic => op::CREATE_RMP,
            SrqKind::Xrc => op::CREATE_XRC_SRQ,
            SrqKind::Tags => op::CREATE_XRQ,
        }
    }

    /// Returns the command that destroys it.
    pub(crate) fn destroy_opcode(self) -> u16 {
        match self {
            SrqKind::Basic => op::DESTROY_RMP,
            SrqKind::Xrc => op::DESTROY_XRC_SRQ,
            SrqKind::Tags => op::DESTROY_XRQ,
        }
    }
}

/// A shared receive queue.
#[derive(Debug)]
pub(crate) struct Srq {
    pub(crate) number: u32,
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
    pub(crate) kind: SrqKind,
    pub(crate) events: Events,
}

/// An XRC domain; one object for each time it was opened.
#[derive(Debug)]
pub(crate) struct Xrcd {
    pub(crate) number: u32,
    /// The file that identifies it: device and inode.
    pub(crate) inode: Option<(u64, u64)>,
    /// The file itself, kept open so that its inode is not reused.
    pub(crate) _file: Option<OwnedFd>,
}

/// A memory region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mr {
    pub(crate) key: u32,
    pub(crate) address: u64,
    pub(crate) length: u64,
    pub(crate) iova: u64,
    pub(crate) access: AccessFlags,
    /// Address of its table of moved pages for the device; 0 if it has none.
    pub(crate) moved: u64,
}

impl Mr {
    /// Returns whether it has on-demand paging.
    pub(crate) fn is_on_demand(&self) -> bool {
        self.access.contains(AccessFlags::ON_DEMAND)
    }
}

/// Returns the logarithm of a power of two that is not less than a length.
pub(crate) fn log_length(length: u64) -> u32 {
    length
        .checked_next_power_of_two()
        .map_or(64, u64::trailing_zeros)
}

/// Device memory: pages of the context's file.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    /// The mapping of all device memory of the context.
    pub(crate) mapping: Arc<Mapping>,
    /// Index of the first page, and number of pages.
    pub(crate) page: u32,
    pub(crate) pages: u32,
    /// Length in bytes, as the program asked for it.
    pub(crate) length: u64,
}

impl DeviceMemory {
    /// Returns the address of its first byte in this process.
    pub(crate) fn address(&self) -> u64 {
        let first = self.mapping.as_ptr().as_ptr().expose_provenance();
        first as u64 + u64::from(self.page) * Mapping::page_size() as u64
    }
}

/// A protection domain.
#[derive(Debug)]
pub(crate) struct Pd {
    pub(crate) number: u32,
}

/// A memory window.
#[derive(Debug)]
pub(crate) struct Mw {
    pub(crate) key: u32,
}

/// A command that creates an object of the device, the object's number, and its type if it is
/// a general object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Created {
    pub(crate) opcode: u16,
    pub(crate) number: u32,
    pub(crate) general: u32,
}

impl Created {
    /// An object that is not a general one.
    pub(crate) fn new(opcode: u16, number: u32) -> Self {
        Self {
            opcode,
            number,
            general: 0,
        }
    }
}

/// An object for a list of objects.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Summary {
    pub(crate) name: &'static str,
    /// Number in the device; 0 if it has none.
    pub(crate) number: u32,
    /// Bytes of memory.
    pub(crate) length: u64,
}

/// What the driver does with an object of any type. The implementation for a type stands
/// beside the commands that concern it.
pub(crate) trait ObjectData: AsAny + Debug + Send {
    /// Returns the kernel's number of its type.
    fn kind(&self) -> u16;

    /// Returns it for a list of objects.
    fn summary(&self) -> Summary;

    /// Returns the number in the device of a queue that events name, or of a UAR.
    fn number(&self) -> Option<u32> {
        None
    }

    /// Describes its creation to an observer of the program's objects.
    fn creation(&self) -> Option<ObjectChange> {
        None
    }

    /// Describes its destruction.
    fn destruction(&self) -> Option<ObjectChange> {
        None
    }

    /// Returns the number of a queue with sends.
    fn send_queue(&self) -> Option<u32> {
        None
    }

    /// Returns the destination of its asynchronous events, if it has any.
    fn events(&self) -> Option<&Events> {
        None
    }

    /// Returns the entry of a pinned region in the index of regions.
    fn region_entry(&self, handle: u32) -> Option<(u32, u64, u32)> {
        let _ = handle;
        None
    }

    /// Returns whether other objects use it that are no objects of the context.
    fn is_busy(&self) -> bool {
        false
    }

    /// Returns whether it represents an object of the device, so that commands of DevX may
    /// concern it.
    fn represents(&self, object: Created) -> bool {
        let _ = object;
        false
    }

    /// Destroys the device's part. The object is not among [`State::objects`] meanwhile.
    ///
    /// # Errors
    /// Those of the device. The object exists as before.
    fn destroy(&mut self, state: &mut State) -> Result<()>;

    /// Releases what the driver holds for it, after it was destroyed.
    fn release(&self, state: &mut State, file: RawFd, handle: u32) {
        let _ = (state, file, handle);
    }

    /// Answers the command that has destroyed it.
    fn report(&self, request: &mut Request) {
        let _ = request;
    }
}

/// Access to the type of an object.
pub(crate) trait AsAny {
    fn as_any(&self) -> &dyn Any;
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

impl<T: Any> AsAny for T {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

/// An object.
#[derive(Debug)]
pub(crate) struct Object {
    /// The context that it belongs to.
    pub(crate) file: RawFd,
    /// Objects that it uses.
    pub(crate) dependencies: Vec<u32>,
    /// Number of uses by other objects.
    pub(crate) uses: usize,
    pub(crate) ranges: Vec<MemoryRange>,
    pub(crate) data: Box<dyn ObjectData>,
}

impl Object {
    /// Creates an object of a context that uses no others and no memory.
    pub(crate) fn new(file: RawFd, data: impl ObjectData + 'static) -> Self {
        Self {
            file,
            dependencies: Vec::new(),
            uses: 0,
            ranges: Vec::new(),
            data: Box::new(data),
        }
    }

    /// Sets the objects that it uses.
    pub(crate) fn using(mut self, dependencies: Vec<u32>) -> Self {
        self.dependencies = dependencies;
        self
    }

    /// Sets the memory that the device may access for it.
    pub(crate) fn with_memory(mut self, ranges: Vec<MemoryRange>) -> Self {
        self.ranges = ranges;
        self
    }

    /// Returns its data if it is of this type.
    pub(crate) fn of<T: ObjectData + 'static>(&self) -> Option<&T> {
        (*self.data).as_any().downcast_ref()
    }

    /// As [`Object::of`], for modification.
    fn of_mut<T: ObjectData + 'static>(&mut self) -> Option<&mut T> {
        (*self.data).as_any_mut().downcast_mut()
    }
}

/// The objects of all contexts.
/// The handle after which those of a child of fork begin.
static LAST_OF_PARENT: AtomicU32 = AtomicU32::new(0);

#[derive(Debug)]
pub(crate) struct Objects {
    objects: HashMap<u32, Object>,
    /// Type, number in the device, and handle of the objects that are found by number.
    numbered: BTreeSet<(u16, u32, u32)>,
    /// Length, as a logarithm rounded up, address and handle of pinned regions.
    regions: BTreeSet<(u32, u64, u32)>,
    last: u32,
    /// Changes by the current command; `None` if there is no observer.
    pub(crate) changes: Option<Vec<ObjectChange>>,
}

macro_rules! typed {
    ($($name:ident, $name_mut:ident: $type:ty;)+) => {
        impl Objects {
            $(
                pub(crate) fn $name(&self, file: RawFd, handle: u32) -> Result<&$type> {
                    self.typed(file, handle)
                }
                #[allow(dead_code, reason = "one of each")]
                pub(crate) fn $name_mut(&mut self, file: RawFd, handle: u32) -> Result<&mut $type> {
                    match self.get_mut(file, handle)?.of_mut() {
                        Some(it) => Ok(it),
                        None => wrong_type::<$type, _>(handle),
                    }
                }
            )+
        }
    };
}

typed! {
    mr, mr_mut: Mr;
    cq, cq_mut: Cq;
    qp, qp_mut: Qp;
    srq, srq_mut: Srq;
    wq, wq_mut: WorkQueue;
    xrcd, xrcd_mut: Xrcd;
    counters, counters_mut: Counters;
}

fn wrong_type<T: ?Sized, U>(handle: u32) -> Result<U> {
    let name = std::any::type_name::<T>();
    let name = name.rsplit("::").next().unwrap_or(name);
    invalid("handle", handle, Rule::OfType(name))
}

impl Default for Objects {
    fn default() -> Self {
        Self {
            objects: HashMap::new(),
            numbered: BTreeSet::new(),
            regions: BTreeSet::new(),
            last: LAST_OF_PARENT.load(Ordering::Relaxed),
            changes: None,
        }
    }
}

impl Objects {
    /// Makes handles of devices that are made later, in a child of fork, follow those of this
    /// one: the child may have its objects, too.
    pub(crate) fn number_children_after(&self) {
        LAST_OF_PARENT.fetch_max(self.last, Ordering::Relaxed);
    }

    /// Returns the number of objects.
    pub(crate) fn len(&self) -> usize {
        self.objects.len()
    }

    /// Adds an object and returns its handle. The objects that it uses must
    /// exist.
    pub(crate) fn insert(&mut self, object: Object) -> u32 {
        loop {
            self.last = self.last.wrapping_add(1);
            if !self.objects.contains_key(&self.last) {
                if let Some(changes) = &mut self.changes {
                    let Summary { name, number, .. } = object.data.summary();
                    let handle = self.last;
                    changes.push(ObjectChange::Created {
                        handle,
                        name,
                        number,
                    });
                    changes.extend(object.data.creation());
                }
                self.restore(self.last, object);
                return self.last;
            }
        }
    }

    /// Adds an object that was removed, by its former handle.
    pub(crate) fn restore(&mut self, handle: u32, object: Object) {
        if let Some(changes) = &mut self.changes {
            let destroyed = object.data.destruction();
            changes.retain(|change| {
                let is_its =
                    matches!(change, ObjectChange::Destroyed { handle: it, .. } if *it == handle);
                !is_its && Some(*change) != destroyed
            });
        }
        if let Some(number) = object.data.number() {
            self.numbered.insert((object.data.kind(), number, handle));
        }
        self.regions.extend(object.data.region_entry(handle));
        for needed in &object.dependencies {
            if let Some(needed) = self.objects.get_mut(needed) {
                needed.uses += 1;
            }
        }
        self.objects.insert(handle, object);
    }

    /// Returns the objects of a type ([`ObjectData::kind`]) that represent a queue or
    /// UAR of the device.
    pub(crate) fn numbered(&self, kind: u16, number: u32) -> impl Iterator<Item = &Object> {
        let handles = self
            .numbered
            .range((kind, number, 0)..=(kind, number, u32::MAX));
        handles.filter_map(|(_, _, handle)| self.objects.get(handle))
    }

    /// Sets the attributes of all objects that represent a queue pair of the device.
    pub(crate) fn set_attributes(&mut self, number: u32, attributes: ModifyQp) {
        let kind = uverbs::abi::ids::OBJECT_QP;
        let range = (kind, number, 0)..=(kind, number, u32::MAX);
        for (_, _, handle) in self.numbered.range(range) {
            let qp = self.objects.get_mut(handle).and_then(Object::of_mut::<Qp>);
            if let Some(qp) = qp {
                qp.attributes = attributes;
            }
        }
    }

    /// Sets the number in the device of a queue pair.
    pub(crate) fn renumber_qp(&mut self, file: RawFd, handle: u32, number: u32) -> Result<()> {
        let qp = self.qp_mut(file, handle)?;
        let before = std::mem::replace(&mut qp.number, number);
        let kind = uverbs::abi::ids::OBJECT_QP;
        self.numbered.remove(&(kind, before, handle));
        self.numbered.insert((kind, number, handle));
        Ok(())
    }

    /// Returns an object of a context.
    pub(crate) fn get(&self, file: RawFd, handle: u32) -> Result<&Object> {
        match self.objects.get(&handle) {
            Some(object) if object.file == file => Ok(object),
            _ => refuse(Class::NotFound, "handle", handle, Rule::Exists),
        }
    }

    /// Returns the object with that handle, of any context.
    pub(crate) fn with_handle(&self, handle: u32) -> Option<&Object> {
        self.objects.get(&handle)
    }

    fn get_mut(&mut self, file: RawFd, handle: u32) -> Result<&mut Object> {
        match self.objects.get_mut(&handle) {
            Some(object) if object.file == file => Ok(object),
            _ => refuse(Class::NotFound, "handle", handle, Rule::Exists),
        }
    }

    /// Returns an object of a context that is of a type.
    pub(crate) fn typed<T: ObjectData + 'static>(&self, file: RawFd, handle: u32) -> Result<&T> {
        match self.get(file, handle)?.of() {
            Some(it) => Ok(it),
            None => wrong_type::<T, _>(handle),
        }
    }

    /// Returns the device's number of a protection domain.
    pub(crate) fn pd(&self, file: RawFd, handle: u32) -> Result<u32> {
        self.typed::<Pd>(file, handle).map(|pd| pd.number)
    }

    /// Returns an object of a type that no other object uses, so that it can be
    /// destroyed.
    pub(crate) fn unused(&self, file: RawFd, handle: u32, kind: u16) -> Result<&Object> {
        let object = self.get(file, handle)?;
        let (name, found) = (object.data.summary().name, object.data.kind());
        is("type of the object", found, kind.into()).map_err(|error| error.of(handle))?;
        if object.uses != 0 || object.data.is_busy() {
            let refused = refuse(Class::Busy, name, object.uses, Rule::Unused);
            return refused.map_err(|error| error.of(handle));
        }
        Ok(object)
    }

    /// Removes an object.
    pub(crate) fn remove(&mut self, handle: u32) -> Option<Object> {
        let object = self.objects.remove(&handle)?;
        if let Some(changes) = &mut self.changes {
            let events = object.data.events();
            let read = |events: &Events| events.reported.load(Ordering::Relaxed);
            changes.push(ObjectChange::Destroyed {
                handle,
                user_handle: events.map_or(0, |events| events.user_handle),
                events: events.map_or(0, read),
            });
            changes.extend(object.data.destruction());
        }
        if let Some(number) = object.data.number() {
            self.numbered.remove(&(object.data.kind(), number, handle));
        }
        if let Some(entry) = object.data.region_entry(handle) {
            self.regions.remove(&entry);
        }
        for needed in &object.dependencies {
            if let Some(needed) = self.objects.get_mut(needed) {
                needed.uses -= 1;
            }
        }
        Some(object)
    }

    /// Returns the objects of a context, unused ones first.
    pub(crate) fn in_context(&self, file: RawFd) -> Vec<(u32, u16)> {
        let objects = self.objects.iter().filter(|(_, it)| it.file == file);
        let mut objects: Vec<_> = objects
            .map(|(handle, it)| (it.uses, *handle, it.data.kind()))
            .collect();
        objects.sort_unstable();
        objects
            .into_iter()
            .map(|(_, handle, kind)| (handle, kind))
            .collect()
    }

    /// Returns the first object of a type that satisfies `find`.
    pub(crate) fn find<T: ObjectData + 'static>(
        &self,
        find: impl Fn(&T) -> bool,
    ) -> Option<(&Object, &T)> {
        let mut typed = self.all().filter_map(|object| Some((object, object.of()?)));
        typed.find(|(_, it)| find(it))
    }

    /// Returns all objects, of every context, with their handles.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (u32, &Object)> {
        self.objects
            .iter()
            .map(|(handle, object)| (*handle, object))
    }

    /// Returns all objects, of every context.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Object> {
        self.objects.values()
    }

    /// Replaces the parameters of a region.
    pub(crate) fn replace_region(&mut self, handle: u32, new: Mr) {
        let mr = self.objects.get_mut(&handle).and_then(Object::of_mut::<Mr>);
        if let Some(mr) = mr {
            let before = std::mem::replace(mr, new);
            if let Some(changes) = &mut self.changes {
                changes.extend(before.destruction());
                changes.extend(new.creation());
            }
            if let Some(entry) = before.region_entry(handle) {
                self.regions.remove(&entry);
            }
            self.regions.extend(new.region_entry(handle));
        }
    }

    /// Returns the pinned regions that may have bytes in a range, with their handles.
    pub(crate) fn regions_in(&self, range: &Range<usize>) -> impl Iterator<Item = (u32, Mr)> {
        let (from, to) = (range.start as u64, range.end as u64);
        let last = self.regions.last().map_or(0, |(log, ..)| log + 1);
        let starts = (0..last).flat_map(move |log| {
            let longest = 1u64.checked_shl(log).unwrap_or(u64::MAX);
            let first = (log, from.saturating_sub(longest), 0);
            self.regions.range(first..(log, to, 0))
        });
        starts.filter_map(|(.., handle)| Some((*handle, *self.region(*handle)?)))
    }

    /// Returns a region of any context.
    pub(crate) fn region(&self, handle: u32) -> Option<&Mr> {
        self.objects.get(&handle)?.of()
    }

    /// Sets the address of a region's table of moved pages.
    pub(crate) fn set_moved(&mut self, handle: u32, moved: u64) {
        let mr = self.objects.get_mut(&handle).and_then(Object::of_mut::<Mr>);
        if let Some(mr) = mr {
            mr.moved = moved;
        }
    }

    /// Replaces a dependency of an object.
    pub(crate) fn replace_dependency(&mut self, handle: u32, from: u32, to: u32) {
        if let Some(object) = self.objects.get_mut(&handle) {
            for needed in &mut object.dependencies {
                if *needed == from {
                    *needed = to;
                }
            }
        }
        if let Some(from) = self.objects.get_mut(&from) {
            from.uses -= 1;
        }
        if let Some(to) = self.objects.get_mut(&to) {
            to.uses += 1;
        }
    }

    /// Replaces the first memory range of an object; returns the former one.
    pub(crate) fn replace_memory(&mut self, handle: u32, new: MemoryRange) -> Option<MemoryRange> {
        let object = self.objects.get_mut(&handle)?;
        let first = object.ranges.first_mut()?;
        Some(std::mem::replace(first, new))
    }
}
