//! Scripts of a hostile guest. The fuzz targets run the same scripts for longer.

use proptest::prelude::*;

use crate::testing::hostile;

fn script() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..400)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_commands(script in script()) {
        hostile::commands(&script);
    }

    #[test]
    fn any_work_requests(script in script()) {
        hostile::work_requests(&script);
    }

    #[test]
    fn any_registers(script in script()) {
        hostile::registers(&script);
    }

    #[test]
    fn any_management(script in script()) {
        hostile::management(&script);
    }
}
