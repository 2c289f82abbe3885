//! Counters of flows.

use super::super::with_pd;
use super::*;

const READ: Target = Target::Method(OBJECT_COUNTERS, METHOD_COUNTERS_READ);

#[test]
fn counters() {
    let (fake, context, _pd) = with_pd();
    let counters = Counters::create(&context).unwrap();
    let handle = u64::from(counters.handle().0);
    let call = only(&fake);
    is_method(&call, OBJECT_COUNTERS, METHOD_COUNTERS_CREATE);
    fake.on(READ, |reply| {
        reply.set(ATTR_READ_COUNTERS_BUFF, [5u64, 6].as_bytes());
        Ok(())
    });
    let mut values = [7; 3];
    counters.read(&mut values, 1).unwrap();
    // What the kernel did not write is zero.
    assert_eq!(values, [5, 6, 0]);
    assert_eq!(
        sent_attrs(&only(&fake)),
        [
            SentAttr::Object(ATTR_READ_COUNTERS_HANDLE, handle),
            SentAttr::Out(ATTR_READ_COUNTERS_BUFF, 24),
            in32(ATTR_READ_COUNTERS_FLAGS, 1),
        ]
    );
    // More than a command can carry, and none, which the kernel refuses.
    assert!(counters.read(&mut vec![0; 1 << 13], 0).is_err());
    drop(counters);
    let call = fake.take_ioctls().pop().unwrap();
    is_method(&call, OBJECT_COUNTERS, METHOD_COUNTERS_DESTROY);
    assert_eq!(
        sent_attrs(&call),
        [SentAttr::Object(ATTR_DESTROY_COUNTERS_HANDLE, handle)]
    );
}
