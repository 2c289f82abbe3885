//! An echo server and its client, over a stream as over TCP.
//!
//! `cargo run --example stream_echo ADDRESS:PORT` runs the server; with further words
//! it runs the client, which sends them and prints the echo.

use std::io::{self, Read, Write};
use std::net::Shutdown;

use ringverbs::stream::{RdmaListener, RdmaStream};

/// Echoes all data until the client ends its stream.
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
    // The server reads the end of the stream, and ends its own.
    stream.shutdown(Shutdown::Write)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    println!("{answer}");
    Ok(())
}
