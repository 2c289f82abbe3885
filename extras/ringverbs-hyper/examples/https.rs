//! HTTPS over RDMA: a server and a client in one process, with TLS by rustls.
//!
//! `https [ADDRESS]`: the address of an RDMA device's network interface. With
//! `RINGVERBS_DEVICE=embedded` no RDMA device is needed.

mod service;

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::Uri;
use hyper::service::service_fn;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use ringverbs::stream::tokio::RdmaListener;
use ringverbs_hyper::{Incoming, RdmaConnector, serve};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// A self-signed certificate of `rdma.example`. The key is public: for this example only.
const CERTIFICATE: &[u8] = include_bytes!("tls/certificate.pem");
const KEY: &[u8] = include_bytes!("tls/key.pem");

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::args().nth(1).unwrap_or("127.0.0.1".to_owned());

    let certificate = CertificateDer::from_pem_slice(CERTIFICATE)?;
    let key = PrivateKeyDer::from_pem_slice(KEY)?;
    let mut roots = RootCertStore::empty();
    roots.add(certificate.clone())?;
    let server = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)?;
    let client = ClientConfig::builder()
        .with_root_certificates(roots)
        .with_no_client_auth();

    let acceptor = TlsAcceptor::from(Arc::new(server));
    let listener = RdmaListener::bind((address.as_str(), 0)).await?;
    let to = listener.local_addr()?;
    let incoming = Incoming::new(listener).over(move |stream| acceptor.accept(stream));
    tokio::spawn(serve(incoming, service_fn(service::answer)));

    let tls = TlsConnector::from(Arc::new(client));
    let connector = RdmaConnector::new().to(to).over(move |stream, uri: Uri| {
        let tls = tls.clone();
        async move {
            let name = uri.host().unwrap_or_default().to_owned();
            let name = ServerName::try_from(name).map_err(io::Error::other)?;
            tls.connect(name, stream).await
        }
    });
    let client = Client::builder(TokioExecutor::new()).build::<_, Empty<Bytes>>(connector);
    let answer = client.get("https://rdma.example/".parse()?).await?;
    let body = answer.into_body().collect().await?.to_bytes();
    print!("{}", String::from_utf8_lossy(&body));

    // The certificate is not valid for another name.
    match client.get("https://other.example/".parse()?).await {
        Ok(_) => Err("the wrong name was accepted".into()),
        Err(_) => {
            println!("another name is refused");
            Ok(())
        }
    }
}
