//! Suppressions: reports that are known, and neither printed nor counted.
//!
//! A file has one on each line: a rule, or `*` for all, and text that the report must contain,
//! such as a function or a file. Empty lines and those that begin with `#` are ignored.

/// A list of suppressions.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Suppressions(Vec<(String, String)>);

impl Suppressions {
    /// Parses a file.
    ///
    /// # Errors
    /// The number of a line whose rule is not one of `rules`.
    pub(crate) fn parse(text: &str, rules: &[&str]) -> Result<Self, usize> {
        let mut list = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (rule, text) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
            if rule != "*" && !rules.contains(&rule) {
                return Err(number + 1);
            }
            list.push((rule.to_owned(), text.trim().to_owned()));
        }
        Ok(Self(list))
    }

    /// Returns whether a report is suppressed.
    pub(crate) fn contain(&self, rule: &str, report: &str) -> bool {
        let mut list = self.0.iter();
        list.any(|(of, text)| (of == "*" || of == rule) && report.contains(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_name_rules_and_parts_of_reports() {
        let parse = |text| Suppressions::parse(text, &["leak", "other"]);
        let list = parse("# known\n\nleak  main (a.c\n* libknown\n").unwrap();
        assert!(list.contain("leak", "at main (a.c:5)"));
        assert!(!list.contain("leak", "at main (b.c:5)"));
        assert!(!list.contain("other", "at main (a.c:5)"));
        assert!(list.contain("other", "at libknown.so+0x5"));
        assert_eq!(parse("leak\nlaek x"), Err(2));
    }
}
