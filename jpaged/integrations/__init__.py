"""jpaged inside other libraries. Each file needs the library that it is named after; nothing else imports it."""
