//! Archives of the format "newc" of cpio, which the kernel unpacks as the initramfs.

/// File type and permissions of folders, programs and other files.
const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const FILE: u32 = 0o100_644;

/// An archive under construction.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    /// Adds a folder, whose parent must be in the archive.
    pub fn folder(&mut self, name: &str) {
        self.entry(name, FOLDER, &[]);
    }

    /// Adds a file, whose folder must be in the archive.
    pub fn file(&mut self, name: &str, contents: &[u8], executable: bool) {
        self.entry(name, if executable { PROGRAM } else { FILE }, contents);
    }

    /// Adds the trailer and returns the archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, contents: &[u8]) {
        self.entries += 1;
        let size = contents.len() as u32;
        let name_size = name.len() as u32 + 1;
        // Number, mode, owner, group, links, time, size, device (4), length of
        // the name, checksum.
        let fields = [
            self.entries,
            mode,
            0,
            0,
            1,
            0,
            size,
            0,
            0,
            0,
            0,
            name_size,
            0,
        ];
        self.bytes.extend(b"070701");
        for field in fields {
            self.bytes.extend(format!("{field:08x}").bytes());
        }
        self.bytes.extend(name.bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(contents);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_and_contents_begin_at_multiples_of_four() {
        let mut archive = Archive::default();
        archive.folder("bin");
        archive.file("bin/sh", b"12345", true);
        let bytes = archive.finish();
        let text = String::from_utf8(bytes).unwrap();
        let headers: Vec<_> = text.match_indices("070701").map(|(at, _)| at).collect();
        // 110 bytes of header; names of 4 and 7 bytes with their NULs; 5 of contents.
        assert_eq!(headers, [0, 116, 244]);
        assert_eq!(&text[116 + 14..116 + 22], "000081ed");
        assert_eq!(&text[116 + 54..116 + 62], "00000005");
        assert_eq!(&text[236..241], "12345");
        assert!(text[244..].contains("TRAILER!!!\0"));
    }
}
