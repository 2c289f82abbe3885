//! serde implementations of types that peers exchange. Values from a peer are
//! validated when they are read.

use serde::de::{Deserialize, Deserializer, Error, Unexpected};
use serde::ser::{Serialize, Serializer};

use crate::qp::Mtu;
use crate::{Gid, RemoteMemory};

/// Deserialises a queue pair number or packet sequence number.
pub(crate) fn number_of_24_bits<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    let number = u32::deserialize(from)?;
    if number < 1 << 24 {
        Ok(number)
    } else {
        let number = Unexpected::Unsigned(number.into());
        Err(D::Error::invalid_value(number, &"a number of 24 bits"))
    }
}

/// Serialised as its code.
impl Serialize for Mtu {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.code().serialize(to)
    }
}

impl<'de> Deserialize<'de> for Mtu {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let code = u8::deserialize(from)?;
        Self::from_code(code).ok_or_else(|| {
            let code = Unexpected::Unsigned(code.into());
            D::Error::invalid_value(code, &"the code of an MTU, 1 to 5")
        })
    }
}

/// An IPv6 address in human-readable formats, otherwise 16 bytes.
impl Serialize for Gid {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        if to.is_human_readable() {
            to.collect_str(self)
        } else {
            self.0.serialize(to)
        }
    }
}

impl<'de> Deserialize<'de> for Gid {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        if from.is_human_readable() {
            std::net::Ipv6Addr::deserialize(from).map(Self::from)
        } else {
            <[u8; 16]>::deserialize(from).map(Self)
        }
    }
}

/// The fields of a [`RemoteMemory`].
#[derive(serde::Serialize, serde::Deserialize)]
struct Fields {
    addr: u64,
    len: u64,
    rkey: u32,
}

impl Serialize for RemoteMemory {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let crate::RemoteAddr { addr, rkey } = self.key();
        let len = self.len() as u64;
        Fields { addr, len, rkey }.serialize(to)
    }
}

impl<'de> Deserialize<'de> for RemoteMemory {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let Fields { addr, len, rkey } = Fields::deserialize(from)?;
        let key = crate::RemoteAddr::new(addr, rkey);
        let memory = usize::try_from(len).ok();
        memory.and_then(|len| Self::new(key, len)).ok_or_else(|| {
            let len = Unexpected::Unsigned(len);
            D::Error::invalid_value(len, &"a length that ends before the last address")
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_str, from_value, json, to_value};

    use crate::qp::Mtu;
    use crate::{Endpoint, Gid, RemoteAddr, RemoteMemory};

    fn endpoint() -> Endpoint {
        Endpoint {
            qp_num: 0xff_ffff,
            psn: 0,
            lid: 0xffff,
            mtu: Mtu::Bytes4096,
            gid: "::ffff:192.0.2.1".parse().unwrap(),
        }
    }

    fn as_json() -> Value {
        json!({
            "qp_num": 16_777_215, "psn": 0, "lid": 65_535, "mtu": 5, "gid": "::ffff:192.0.2.1",
        })
    }

    #[test]
    fn endpoint_text_round_trips() {
        assert_eq!(to_value(endpoint()).unwrap(), as_json());
        assert_eq!(from_value::<Endpoint>(as_json()).unwrap(), endpoint());
        let key = RemoteAddr::new(u64::MAX, u32::MAX);
        let text = serde_json::to_string(&key).unwrap();
        assert_eq!(text, r#"{"addr":18446744073709551615,"rkey":4294967295}"#);
        assert_eq!(from_str::<RemoteAddr>(&text).unwrap(), key);
        let memory = RemoteMemory::new(RemoteAddr::new(4096, 7), 100).unwrap();
        let text = serde_json::to_string(&memory).unwrap();
        assert_eq!(text, r#"{"addr":4096,"len":100,"rkey":7}"#);
        assert_eq!(from_str::<RemoteMemory>(&text).unwrap(), memory);
        let beyond = r#"{"addr":18446744073709551615,"len":2,"rkey":7}"#;
        assert!(from_str::<RemoteMemory>(beyond).is_err());
    }

    /// Each field in turn has an invalid value.
    #[test]
    fn invalid_endpoint_names_the_field() {
        let bad = [
            ("qp_num", json!(1 << 24), "24 bits"),
            ("qp_num", json!(-1), "u32"),
            ("qp_num", json!(1.5), "u32"),
            ("psn", json!(u32::MAX), "24 bits"),
            ("psn", json!(u64::MAX), "u32"),
            ("lid", json!(65_536), "u16"),
            ("mtu", json!(0), "1 to 5"),
            ("mtu", json!(6), "1 to 5"),
            ("mtu", json!("5"), "u8"),
            ("gid", json!("192.0.2.1"), "IPv6"),
            ("gid", json!("::ffff:192.0.2.1 "), "IPv6"),
            ("gid", json!(""), "IPv6"),
            ("gid", json!(vec![0; 16]), "IPv6"),
        ];
        for (field, value, says) in bad {
            let mut all = as_json();
            all[field] = value.clone();
            let error = from_value::<Endpoint>(all).unwrap_err().to_string();
            assert!(error.contains(says), "{field} = {value}: {error}");
        }
        for field in ["qp_num", "psn", "lid", "mtu", "gid"] {
            let mut all = as_json();
            all.as_object_mut().unwrap().remove(field);
            let error = from_value::<Endpoint>(all).unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
        for text in ["", "{", "null", "[]", "{}", r#"{"addr":-1,"rkey":0}"#] {
            assert!(from_str::<Endpoint>(text).is_err(), "{text}");
            assert!(from_str::<RemoteAddr>(text).is_err(), "{text}");
        }
    }

    /// A text that is truncated or changed is refused, or still a valid endpoint.
    #[test]
    fn damaged_text_is_refused_or_in_range() {
        let text = as_json().to_string();
        for end in 0..text.len() {
            assert!(from_str::<Endpoint>(&text[..end]).is_err(), "{end}");
        }
        for at in 0..text.len() {
            for byte in b' '..=b'~' {
                let mut damaged = text.clone().into_bytes();
                damaged[at] = byte;
                if let Ok(read) = serde_json::from_slice::<Endpoint>(&damaged) {
                    assert!(read.qp_num < 1 << 24 && read.psn < 1 << 24, "{read:?}");
                    assert!((256..=4096).contains(&read.mtu.bytes()), "{read:?}");
                }
            }
        }
    }

    /// A binary format has the 16 bytes of the GID.
    #[test]
    fn gid_is_16_bytes_in_binary_formats() {
        use serde::Deserialize;
        use serde::de::value::{Error, SeqDeserializer};
        // A binary format: a sequence that is not human-readable.
        struct Binary<D>(D);
        impl<'de, D: serde::Deserializer<'de>> serde::Deserializer<'de> for Binary<D> {
            type Error = D::Error;
            fn deserialize_any<V: serde::de::Visitor<'de>>(
                self,
                visitor: V,
            ) -> Result<V::Value, D::Error> {
                self.0.deserialize_any(visitor)
            }
            fn is_human_readable(&self) -> bool {
                false
            }
            serde::forward_to_deserialize_any! {
                bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes
                byte_buf option unit unit_struct newtype_struct seq tuple tuple_struct map
                struct enum identifier ignored_any
            }
        }
        let read = |count: u8| {
            let bytes = SeqDeserializer::<_, Error>::new(0..count);
            Gid::deserialize(Binary(bytes))
        };
        assert_eq!(read(16).unwrap().0, std::array::from_fn(|at| at as u8));
        assert!(read(15).is_err());
    }
}
