//! PAGE_FAULT_RESUME: the driver reports that pages are present.

use roce::bits::{Field, field, flag};

use crate::engine::core::Core;
use crate::platform::Platform;
use crate::status::{Outcome, Rule, invalid};

const ERROR: Field = flag(8, 31);
const TOKEN_HIGH: Field = field(8, 15, 0);
const TOKEN_LOW: Field = field(0xc, 31, 0);

impl<P: Platform> Core<P> {
    pub(crate) fn page_fault_resume(&mut self, input: &[u8]) -> Outcome {
        let token = u64::from(TOKEN_HIGH.get(input)) << 32 | u64::from(TOKEN_LOW.get(input));
        let now = self.platform.now();
        if self.paging.resume(token, ERROR.is_set(input), now) {
            Ok(())
        } else {
            Err(invalid("token", token, Rule::Exists))
        }
    }
}
