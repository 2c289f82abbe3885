//! Hostile guests: any input is handled without a panic.

use proptest::prelude::*;

use crate::testing::driver::{Driver, segment};

fn opcodes() -> impl Strategy<Value = u16> {
    prop_oneof![
        0x100..0x110_u16,
        0x200..0x208_u16,
        0x300..0x304_u16,
        0x400..0x404_u16,
        0x500..0x50f_u16,
        0x700..0x71b_u16,
        0x750..0x774_u16,
        0x800..0x830_u16,
        0x900..0x940_u16,
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Commands with arbitrary contents, on an HCA with objects.
    #[test]
    fn any_command_gets_a_response(
        commands in prop::collection::vec(
            (opcodes(), prop::collection::vec(any::<u8>(), 0..600), 0..600_usize, any::<bool>()),
            1..40,
        )
    ) {
        let mut driver = Driver::new("roce");
        let cq = driver.create_cq(4);
        let qp = driver.create_qp(0, &cq, None);
        driver.connect(qp.number, qp.number, 1);
        for (opcode, mut input, output, is_low_number) in commands {
            input.resize(input.len().max(12), 0);
            input[..2].copy_from_slice(&opcode.to_be_bytes());
            if is_low_number {
                // Low numbers, which objects have.
                input[8..11].fill(0);
            }
            let response = driver.hca.execute(&input, output);
            prop_assert!(response.len() <= output);
            driver.run();
        }
    }

    /// Reads and writes anywhere in the register space.
    #[test]
    fn any_register_access_is_handled(
        accesses in prop::collection::vec(
            (0..0x2_0000_u64, prop::collection::vec(any::<u8>(), 0..65), any::<bool>()),
            1..100,
        )
    ) {
        let mut driver = Driver::new("ib");
        let cq = driver.create_cq(4);
        driver.create_qp(0, &cq, None);
        for (offset, mut bytes, write) in accesses {
            if write {
                driver.hca.write(offset, &bytes);
            } else {
                driver.hca.read(offset, &mut bytes);
            }
            driver.hca.flush_blue_flame();
            driver.run();
        }
    }

    /// WQEs of arbitrary bytes.
    #[test]
    fn any_work_request_is_handled(
        requests in prop::collection::vec(
            (any::<u8>(), any::<u8>(), prop::collection::vec(any::<u8>(), 0..200), any::<bool>()),
            1..30,
        ),
        st in 0..4_u32,
    ) {
        let mut driver = Driver::new("ib");
        let mut cq = driver.create_cq(6);
        let mut a = driver.create_qp(st, &cq, None);
        let number = a.number;
        driver.connect(number, number, 1);
        let (key, memory) = (driver.key, driver.pages(1));
        for (opcode, flags, mut bytes, is_valid) in requests {
            if is_valid {
                bytes = segment(64, key, memory);
            }
            driver.post_recv(&mut a, &segment(64, key, memory));
            driver.post(&mut a, opcode & 0x3f, flags, &bytes);
            while driver.poll(&mut cq).is_some() {}
        }
    }
}
