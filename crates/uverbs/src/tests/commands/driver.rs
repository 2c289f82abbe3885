//! Methods that a driver adds, and outputs that it adds to common ones.

use super::super::with_pd;
use super::*;
use crate::driver::{DriverMethod, DriverOutput, Ioctl, Kind, NAMESPACE, Owned};
use crate::kernel::fake::{AttrSpec, AttrType, MethodSpec};

const CONTEXT: Target = Target::Method(OBJECT_DEVICE, METHOD_QUERY_CONTEXT);
const RESPONSE: u16 = NAMESPACE;
const OBJECT: u16 = NAMESPACE + 3;
const ATTR_HANDLE: u16 = NAMESPACE;
const ATTR_SIZE: u16 = NAMESPACE + 1;
const ATTR_NUMBER: u16 = NAMESPACE + 2;

static ALLOC: DriverMethod = DriverMethod {
    name: "TABLE_ALLOC",
    object: "table",
    object_id: OBJECT,
    method_id: NAMESPACE,
};
static FREE: DriverMethod = DriverMethod {
    name: "TABLE_FREE",
    object: "table",
    object_id: OBJECT,
    method_id: NAMESPACE + 1,
};

const fn spec(id: u16, ty: AttrType) -> AttrSpec {
    AttrSpec {
        id,
        ty,
        mandatory: true,
    }
}

const METHODS: &[MethodSpec] = &[
    MethodSpec {
        object: OBJECT,
        method: NAMESPACE,
        udata: false,
        attrs: &[
            spec(ATTR_HANDLE, AttrType::New(OBJECT)),
            spec(ATTR_SIZE, AttrType::In(4, 4)),
            spec(ATTR_NUMBER, AttrType::Out(4)),
        ],
    },
    MethodSpec {
        object: OBJECT,
        method: NAMESPACE + 1,
        udata: false,
        attrs: &[spec(ATTR_HANDLE, AttrType::Destroy(OBJECT))],
    },
    MethodSpec {
        object: OBJECT_DEVICE,
        method: METHOD_QUERY_CONTEXT,
        udata: false,
        attrs: &[spec(RESPONSE, AttrType::Out(68))],
    },
];

enum Table {}

impl Kind for Table {
    type Handle = u32;
    type Events = ();
    const DESTROY: Command = Command::Driver(&FREE);
    fn destroy(context: &Context, handle: u32) -> Result<(), Error> {
        // SAFETY: no input is added.
        let mut ioctl = unsafe { Ioctl::driver(&FREE) };
        ioctl.acts_on(handle);
        ioctl.handle(ATTR_HANDLE, handle);
        ioctl.run(context).map(drop)
    }
}

fn alloc(context: &Context, size: u32) -> Result<(Owned<&Context, Table>, u32), Error> {
    let mut number = 0u32;
    // SAFETY: the fake accesses no memory.
    let mut ioctl = unsafe { Ioctl::driver(&ALLOC) };
    let object = ioctl.new_object(ATTR_HANDLE);
    ioctl.u32(ATTR_SIZE, size);
    let output = ioctl.output(ATTR_NUMBER, number.as_mut_bytes());
    let answer = ioctl.run(context)?;
    let table = Owned::new(&context, answer.handle(object)?);
    answer.all_written(&[output])?;
    Ok((table, number))
}

#[test]
fn an_object_of_a_drivers_own() {
    let (fake, context) = context();
    // The kernel's driver does not have the method.
    let error = alloc(&context, 7).unwrap_err();
    assert_eq!(error.errno().raw(), libc::EPROTONOSUPPORT);
    assert!(error.to_string().starts_with("TABLE_ALLOC on table: "));
    fake.take_calls();

    fake.add_methods(METHODS);
    fake.on(Target::Method(OBJECT, NAMESPACE), |reply| {
        reply.set(ATTR_NUMBER, 0x55u32.as_bytes());
        Ok(())
    });
    let (table, number) = alloc(&context, 7).unwrap();
    assert_eq!(number, 0x55);
    let call = only(&fake);
    is_method(&call, OBJECT, NAMESPACE);
    assert_eq!(
        sent_attrs(&call),
        [
            SentAttr::Object(ATTR_HANDLE, 0),
            in32(ATTR_SIZE, 7),
            SentAttr::Out(ATTR_NUMBER, 4),
        ]
    );
    let handle = table.handle();
    assert_eq!(fake.live_objects(), [(handle, OBJECT)]);
    drop(table);
    let call = only(&fake);
    is_method(&call, OBJECT, NAMESPACE + 1);
    assert_eq!(
        sent_attrs(&call),
        [SentAttr::Object(ATTR_HANDLE, handle.into())]
    );
    assert!(fake.live_objects().is_empty());

    // It is gone.
    let error = Table::destroy(&context, handle).unwrap_err();
    assert_eq!(
        error,
        Error::refused(
            Command::Driver(&FREE),
            Some(handle),
            Errno::new(libc::ENOENT)
        )
    );
    // An answer without the output.
    fake.on(Target::Method(OBJECT, NAMESPACE), |reply| {
        reply.set_unwritten(ATTR_NUMBER);
        Ok(())
    });
    let error = alloc(&context, 7).unwrap_err();
    assert_eq!(error.errno().raw(), libc::EPROTO);
    assert!(fake.live_objects().is_empty());
}

#[test]
fn a_handle_of_another_kind_is_refused() {
    let (fake, context, pd) = with_pd();
    fake.add_methods(METHODS);
    let error = Table::destroy(&context, pd.handle().0).unwrap_err();
    assert_eq!(error.errno().raw(), libc::EINVAL);
}

#[test]
fn a_context_with_the_drivers_answer() {
    let (fake, context) = context();
    fake.add_methods(METHODS);
    fake.on(CONTEXT, |reply| {
        reply.set(ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS, 7u32.as_bytes());
        reply.set(ATTR_QUERY_CONTEXT_CORE_SUPPORT, 1u64.as_bytes());
        reply.set(RESPONSE, &[9; 70]);
        Ok(())
    });
    let query = |answer: &mut [u8]| {
        context.query_context_with([DriverOutput {
            attr_id: RESPONSE,
            buffer: answer,
        }])
    };
    let mut answer = [0xff; 72];
    let info = query(&mut answer).unwrap();
    let expected = ContextInfo {
        num_comp_vectors: 7,
        core_support: 1,
    };
    assert_eq!(info, expected);
    // If the driver's answer is shorter, the rest is zero.
    assert_eq!((&answer[..70], &answer[70..]), (&[9; 70][..], &[0; 2][..]));
    let call = only(&fake);
    is_method(&call, OBJECT_DEVICE, METHOD_QUERY_CONTEXT);
    assert_eq!(
        sent_attrs(&call),
        [
            SentAttr::Out(ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS, 4),
            SentAttr::Out(ATTR_QUERY_CONTEXT_CORE_SUPPORT, 8),
            SentAttr::Out(RESPONSE, 72),
        ]
    );
    for missing in [ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS, RESPONSE] {
        fake.on(CONTEXT, move |reply| {
            reply.set_unwritten(missing);
            Ok(())
        });
        let error = query(&mut answer).unwrap_err();
        assert_eq!(error.errno().raw(), libc::EPROTO, "{missing:#x}");
    }
}
