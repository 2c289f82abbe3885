//! The counter on a network that misbehaves.

use counter::{Client, Error, Server};
use ringverbs_testkit::{Fabric, Kind, connect};

/// A client and a server, connected.
fn start(fabric: &Fabric) -> Result<(Client, Server), Error> {
    let mut client = Client::new(&fabric.node(0).open()?)?;
    let mut server = Server::new(&fabric.node(1).open()?)?;
    connect(&mut client.qp, &mut server.qp)?;
    Ok((client, server))
}

/// A lost request is repeated; one whose answer is lost is not executed twice.
#[test]
fn every_increment_counts_once() -> Result<(), Error> {
    let fabric = Fabric::builder().deny_leaks().build(2)?;
    let (mut client, server) = start(&fabric)?;
    fabric.frames().chance(0.2).lose();
    for value in 0..50 {
        assert_eq!(client.increment(server.key())?, value);
    }
    assert_eq!(server.value()?, 50);
    assert!(fabric.capture().count(Kind::AtomicRequest) > 50);
    Ok(())
}

#[test]
fn a_dead_server_is_an_error() -> Result<(), Error> {
    let fabric = Fabric::infiniband(2)?;
    let (mut client, server) = start(&fabric)?;
    client.increment(server.key())?;
    fabric.node(1).die();
    let error = client.increment(server.key()).unwrap_err().to_string();
    assert!(error.contains("retries exceeded"), "{error}");
    assert!(client.increment(server.key()).is_err());
    Ok(())
}
