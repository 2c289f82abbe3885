//! An echo server and its client, over a stream as over TCP.
//!
//! `cargo run --example stream_echo ADDRESS:PORT` serves; with words behind the
//! address it sends them, and prints what comes back.

use std::io::{self, Read, Write};
use std::net::Shutdown;

use ringverbs::stream::{RdmaListener, RdmaStream};

/// Sends back what comes, until the client ends its stream.
fn echo(mut stream: RdmaStream) -> io::Result<u64> {
    let mut writer = stream.try_clone()?;
    let bytes = io::copy(&mut stream, &mut writer)?;
    writer.shutdown(Shutdown::Write)?;
    Ok(bytes)
}

fn serve(address: &str) -> io::Result<()> {
    let listener = RdmaListener::bind(address)?;
    println!("listening on {}", listener.local_addr()?);
    loop {
        let (stream, peer) = listener.accept()?;
        // A thread for each client.
        std::thread::spawn(move || match echo(stream) {
            Ok(bytes) => println!("{peer}: {bytes} bytes"),
            Err(error) => println!("{peer}: {error}"),
        });
    }
}

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().unwrap_or("0.0.0.0:7471".to_owned());
    let words: Vec<String> = arguments.collect();
    if words.is_empty() {
        return Ok(serve(&address)?);
    }
    let mut stream = RdmaStream::connect(&address)?;
    stream.write_all(words.join(" ").as_bytes())?;
    // The server reads an end, and its answer ends as well.
    stream.shutdown(Shutdown::Write)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    println!("{answer}");
    Ok(())
}
