//! Contexts that a child of fork has, too, as on a card: those with protection domains and UARs
//! alone. Queues and regions refer to the parent's memory, of which the child has a copy.
//!
//! The child makes each context anew on its own device, with the same file, handles and numbers,
//! since the program's structures contain them.

use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;

use softhca::command::opcode as op;
use softhca::rule::Rule;

use crate::driver::cause::{Class, Result, errno_of, refuse, system};
use crate::driver::command::{self, Input, make};
use crate::driver::devx::Uar;
use crate::driver::event::{EventFile, FileKind};
use crate::driver::files::{ContextFile, File, UAR, UARS, uar_mapping};
use crate::driver::object::{Object, Pd};
use crate::driver::state::State;

/// Largest number of an object that is made anew.
const MAX_NUMBER: u32 = 1 << 16;

/// A context with nothing but protection domains, UARs and event files.
#[derive(Clone, Debug)]
pub struct InheritedContext {
    /// It may issue commands.
    is_user: bool,
    /// The program allocates all of its UARs.
    allocates_uars: bool,
    /// The UAR of queues that name none.
    uar: Option<u32>,
    /// Handles and numbers of protection domains.
    domains: Vec<(u32, u32)>,
    /// Handles, numbers and slots of UARs.
    uars: Vec<(u32, u32, u32)>,
    /// Its event files: the device's descriptors.
    events: Vec<(RawFd, FileKind)>,
}

impl InheritedContext {
    /// Returns the descriptors of its event files, in the order of those of a context that was
    /// made anew.
    pub fn events(&self) -> impl Iterator<Item = RawFd> {
        self.events.iter().map(|(fd, _)| *fd)
    }
}

impl State {
    /// Returns a context, by its descriptor, unless it has objects that a child cannot have.
    pub(crate) fn inheritable(&self, fd: RawFd) -> Option<InheritedContext> {
        let Some(File::Context(context)) = self.files.get(&fd) else {
            return None;
        };
        if !context.initialized || context.transport_domain.is_some() || context.memory.is_used() {
            return None;
        }
        let mut inherited = InheritedContext {
            is_user: context.uid != 0,
            allocates_uars: context.allocates_uars,
            uar: context.uar,
            domains: Vec::new(),
            uars: Vec::new(),
            events: Vec::new(),
        };
        for (handle, _) in self.objects.in_context(fd) {
            let object = self.objects.with_handle(handle)?;
            if let Some(pd) = object.of::<Pd>() {
                inherited.domains.push((handle, pd.number));
            } else if let Some(uar) = object.of::<Uar>() {
                inherited.uars.push((handle, uar.number, uar.slot));
            } else {
                return None;
            }
        }
        for (events, file) in &self.files {
            let File::Events(file) = file else { continue };
            for kind in [FileKind::Async, FileKind::Completions] {
                if file.matches(kind, context.id) {
                    inherited.events.push((*events, kind));
                }
            }
        }
        inherited.events.sort_unstable_by_key(|(fd, _)| *fd);
        Some(inherited)
    }

    /// Makes contexts of the parent anew, before the device has others. Returns the descriptors
    /// of each, with those of its event files.
    ///
    /// # Errors
    /// ENOMEM; EINVAL if a file is not that of a context.
    pub(crate) fn adopt(
        &mut self,
        contexts: Vec<(InheritedContext, OwnedFd)>,
    ) -> Result<Vec<(RawFd, Vec<RawFd>)>> {
        let mut adopted = Vec::new();
        let mut all = Vec::new();
        for (inherited, registers) in contexts {
            let (file, fd) = ContextFile::with_registers(registers)?;
            let mapping = file.map_registers();
            let mapping = mapping
                .or_else(|_| refuse(Class::NoMemory, "mapping of registers", fd, Rule::Granted))?;
            let id = file.id;
            self.watch.add_context(id, mapping);
            self.files.insert(fd, File::Context(Box::new(file)));
            let mut uid = 0;
            if inherited.is_user {
                uid = make(&mut self.hca, &Input::new(op::CREATE_UCTX, 32))?;
            }
            let context = self.context(fd)?;
            context.set_initialized(inherited.allocates_uars);
            (context.uid, context.uar) = (uid, inherited.uar);
            if !inherited.allocates_uars {
                for uar in 0..UARS as usize {
                    self.watch.add_uar(id, uar * UAR);
                }
            }
            let mut events = Vec::new();
            for (_, kind) in &inherited.events {
                let made = EventFile::new(*kind, id);
                let (file, number) = made.map_err(system("event file of context", id))?;
                let context = self.context(fd)?;
                if *kind == FileKind::Async && context.events.is_none() {
                    context.events = Some(Arc::clone(&file));
                }
                self.files.insert(number, File::Events(file));
                events.push(number);
            }
            adopted.push((fd, events));
            all.push((fd, id, uid, inherited));
        }
        // In ascending order, as the device numbers them.
        let uars = all.iter().flat_map(|(_, _, uid, it)| {
            let own = it.uars.iter().map(|(_, number, _)| *number);
            own.chain(it.uar).map(|number| (number, *uid))
        });
        self.make_numbered((op::ALLOC_UAR, op::DEALLOC_UAR), uars.collect())?;
        let domains = all
            .iter()
            .flat_map(|(_, _, uid, it)| it.domains.iter().map(|(_, number)| (*number, *uid)));
        self.make_numbered((op::ALLOC_PD, op::DEALLOC_PD), domains.collect())?;
        for (fd, id, _, inherited) in all {
            for (handle, number) in inherited.domains {
                let object = Object::new(fd, Pd { number });
                self.objects.restore(handle, object);
            }
            for (handle, number, slot) in inherited.uars {
                self.context(fd)?.take_uar_slot(slot);
                self.watch.add_uar(id, uar_mapping(slot).0 as usize);
                let object = Object::new(fd, Uar { number, slot });
                self.objects.restore(handle, object);
            }
        }
        Ok(adopted)
    }

    /// Makes objects with these numbers, of these user contexts.
    fn make_numbered(
        &mut self,
        (create, destroy): (u16, u16),
        mut numbers: Vec<(u32, u32)>,
    ) -> Result<()> {
        numbers.sort_unstable();
        let mut spare = Vec::new();
        let mut made = Ok(());
        for (wanted, uid) in numbers {
            made = loop {
                let input = Input::new(create, 16).by(uid);
                let number = match make(&mut self.hca, &input) {
                    Ok(number) => number,
                    Err(error) => break Err(error),
                };
                if number == wanted {
                    break Ok(());
                }
                spare.push((number, uid));
                if number > wanted || number >= MAX_NUMBER {
                    break refuse(Class::NoMemory, "number", wanted, Rule::Free);
                }
            };
            if made.is_err() {
                break;
            }
        }
        for (number, uid) in spare {
            command::run(&mut self.hca, &Input::about(destroy, number).by(uid), 16)?;
        }
        made
    }
}

impl ContextFile {
    /// Returns the file of a context with the registers of another one, which this process has
    /// mapped.
    fn with_registers(registers: OwnedFd) -> Result<(Self, RawFd)> {
        use nix::fcntl::{FcntlArg, SealFlag, fcntl};
        use nix::sys::stat::fstat;

        let failed = |errno| system("file of registers", 0)(errno_of(errno));
        let seals = fcntl(&registers, FcntlArg::F_GET_SEALS).map_err(failed)?;
        let is_sealed = seals & SealFlag::F_SEAL_SHRINK.bits() != 0;
        let length = fstat(&registers).map_err(failed)?.st_size;
        if !is_sealed || length != Self::all() as i64 {
            return refuse(Class::Invalid, "file of registers", length, Rule::Exists);
        }
        Ok(Self::of(registers))
    }
}
