//! Completions of any bytes. The fuzzer looks longer (`fuzz/README.md`).

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn hostile_device(
        script in prop::collection::vec(any::<u8>(), 0..1500),
    ) {
        crate::hostile::completions(&script);
    }
}
