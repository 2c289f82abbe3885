//! Queries of objects that another process created through a shared file.

use super::super::with_pd;
use super::*;
use crate::abi::mlx5;

const CONTEXT: Target = Target::Method(OBJECT_DEVICE, METHOD_QUERY_CONTEXT);
const PD: Target = Target::Method(OBJECT_PD, mlx5::METHOD_PD_QUERY);

#[test]
fn a_context_with_the_drivers_answer() {
    let (fake, context) = context();
    fake.on(CONTEXT, |reply| {
        reply.set(ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS, 7u32.as_bytes());
        reply.set(ATTR_QUERY_CONTEXT_CORE_SUPPORT, 1u64.as_bytes());
        reply.set(mlx5::ATTR_QUERY_CONTEXT_RESP, &[9; 70]);
        Ok(())
    });
    let mut answer = [0xff; 72];
    let info = mlx5_import::query_context(&context, &mut answer).unwrap();
    let told = ContextInfo {
        num_comp_vectors: 7,
        core_support: 1,
    };
    assert_eq!(info, told);
    // If the driver's answer is shorter, the rest is zero.
    assert_eq!((&answer[..70], &answer[70..]), (&[9; 70][..], &[0; 2][..]));
    let call = only(&fake);
    is_method(&call, OBJECT_DEVICE, METHOD_QUERY_CONTEXT);
    assert_eq!(
        sent(&call),
        [
            Sent::Out(ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS, 4),
            Sent::Out(ATTR_QUERY_CONTEXT_CORE_SUPPORT, 8),
            Sent::Out(mlx5::ATTR_QUERY_CONTEXT_RESP, 72),
        ]
    );
    for missing in [
        ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS,
        mlx5::ATTR_QUERY_CONTEXT_RESP,
    ] {
        fake.on(CONTEXT, move |reply| {
            reply.set_unwritten(missing);
            Ok(())
        });
        let error = mlx5_import::query_context(&context, &mut answer).unwrap_err();
        assert_eq!(error.errno().raw(), libc::EPROTO, "{missing:#x}");
    }
}

#[test]
fn a_protection_domain() {
    let (fake, context, pd) = with_pd();
    fake.on(PD, |reply| {
        reply.set(mlx5::ATTR_QUERY_PD_NUMBER, 0x55u32.as_bytes());
        Ok(())
    });
    assert_eq!(mlx5_import::query_pd(&context, pd.handle()).unwrap(), 0x55);
    let call = only(&fake);
    is_method(&call, OBJECT_PD, mlx5::METHOD_PD_QUERY);
    assert_eq!(
        sent(&call),
        [
            Sent::Object(mlx5::ATTR_QUERY_PD_HANDLE, pd.handle().0.into()),
            Sent::Out(mlx5::ATTR_QUERY_PD_NUMBER, 4),
        ]
    );
    let error = mlx5_import::query_pd(&context, PdHandle(0x1234)).unwrap_err();
    assert_eq!(error.errno().raw(), libc::ENOENT);
    fake.on(PD, |reply| {
        reply.set_unwritten(mlx5::ATTR_QUERY_PD_NUMBER);
        Ok(())
    });
    let error = mlx5_import::query_pd(&context, pd.handle()).unwrap_err();
    assert_eq!(error.errno().raw(), libc::EPROTO);
}
