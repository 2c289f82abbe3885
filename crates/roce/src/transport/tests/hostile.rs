//! A queue pair keeps its invariants whatever a peer sends. The fuzz target `packet`
//! runs the same script for longer.

use super::super::hostile::play;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_script(script in proptest::collection::vec(any::<u8>(), 0..600)) {
        play(&script);
    }

    /// Scripts of plausible steps reach more states than random bytes.
    #[test]
    fn plausible_scripts(
        head: [u8; 2],
        steps in proptest::collection::vec((1u8..8, any::<[u8; 3]>(), -3i8..3, any::<[u8; 24]>()), 0..40),
    ) {
        let mut script = head.to_vec();
        for (step, [opcode, bits, length], delta, rest) in steps {
            script.extend([step, opcode & 0xbf, bits | 8, delta as u8, length]);
            if step <= 3 {
                // Address, key and length of a RETH, mostly valid.
                script.extend([0, 0, 0, 0, 0, 0, rest[0] & 0x7f, rest[1], 0, 0, 0, 1, 0, 0, 4, 0]);
            }
            script.extend(&rest[2..]);
        }
        play(&script);
    }
}
