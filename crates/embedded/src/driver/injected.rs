//! Verbs that fail by an injected fault.

use uverbs::abi::ids::{METHOD_INVOKE_WRITE, OBJECT_DEVICE};

use softhca::fault::Action;
use softhca::platform::Clock;

use crate::driver::cause::{Result, injected, no_memory_lock, verb_name};
use crate::driver::object::Mr;
use crate::driver::request::Request;
use crate::driver::state::State;

impl State {
    /// Fails a verb by a fault that names it.
    pub(crate) fn inject_failure(&mut self, request: &Request) -> Result<()> {
        let now = self.hca.platform().now();
        let Some(injector) = self.hca.injector() else {
            return Ok(());
        };
        let is_write = (request.object, request.method) == (OBJECT_DEVICE, METHOD_INVOKE_WRITE);
        let write = is_write.then(|| request.write_command()).transpose()?;
        let name = verb_name(request.object, request.method, write);
        match name.and_then(|name| injector.verb(now, name)) {
            Some((line, errno)) => injected(line, errno),
            None => Ok(()),
        }
    }

    /// Does what faults have set off that the device cannot do itself.
    pub(crate) fn apply_effects(&mut self) {
        while let Some(effect) = self.hca.next_effect() {
            match effect.action {
                Action::DeviceFatal => self.fail(),
                Action::Die => {
                    if let Some(die) = self.on_die {
                        die();
                    }
                }
                _ => {}
            }
        }
    }

    /// Fails the registration of memory beyond what a fault permits.
    pub(crate) fn check_memlock(&mut self, length: u64) -> Result<()> {
        if self.hca.injector().is_none() {
            return Ok(());
        }
        let registered = self.objects.all().filter_map(|object| {
            let region = object.of::<Mr>()?;
            Some(region.length)
        });
        let total = registered.fold(length, u64::saturating_add);
        let now = self.hca.platform().now();
        let injector = self.hca.injector();
        match injector.and_then(|it| it.registration(now, total)) {
            Some(line) => no_memory_lock(line),
            None => Ok(()),
        }
    }
}
